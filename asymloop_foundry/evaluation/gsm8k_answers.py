# SPDX-License-Identifier: Apache-2.0
"""Final numbers of GSM8K solutions, read from references and from what a model wrote.

A reference ends in ``#### NUMBER``. Numbers are compared by value, so that 29.00 is 29, and a completion
without a number is wrong, never left out.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

__all__ = ['Score', 'final_number', 'last_number', 'reference_number', 'score']

_SIGN = r'[-+\u2212]'
# Commas count only where they group thousands: in '72, altogether' the number ends before it.
_DIGITS = r'(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+'
_CURRENCY = r'[$€£]'
_MARKED = re.compile(rf'####\s*({_SIGN}?)\s*{_CURRENCY}?\s*({_SIGN}?)({_DIGITS})')
# A hyphen behind a word or a bracket is a subtraction or a range, not a sign.
_ANYWHERE = re.compile(rf'((?<![\w)\].]){_SIGN})?{_CURRENCY}?((?<=[$€£]){_SIGN})?({_DIGITS})')


@dataclass(frozen=True)
class Score:
    """Whether a completion is right.

    Attributes:
        strict: its number behind ``####`` is the reference's; what is reported.
        flexible: the same, or without ``####`` its last number is.
    """

    strict: bool
    flexible: bool


def final_number(text: str) -> Decimal | None:
    """The number behind the first ``####`` that one follows; ``None`` without."""
    match = _MARKED.search(text)
    return None if match is None else _value(*match.groups())


def last_number(text: str) -> Decimal | None:
    """The last number anywhere in the text; ``None`` without."""
    matches = list(_ANYWHERE.finditer(text))
    return _value(*matches[-1].groups()) if matches else None


def reference_number(answer: str) -> Decimal:
    """The number of a reference answer.

    Raises:
        ValueError: the answer has none.
    """
    number = final_number(answer)
    if number is None:
        raise ValueError(
            f'the reference answer {answer[-60:]!r} has no number behind "####"; is this a GSM8K file?'
        )
    return number


def score(completion: str, reference: str) -> Score:
    """Compares a completion with a reference answer.

    Raises:
        ValueError: the reference has no number.
    """
    right = reference_number(reference)
    marked = final_number(completion)
    found = last_number(completion) if marked is None else marked
    return Score(strict=marked == right, flexible=found == right)


def _value(sign: str | None, inner_sign: str | None, digits: str) -> Decimal:
    value = Decimal(digits.replace(',', ''))
    return -value if '-' in _ascii(sign) + _ascii(inner_sign) else value


def _ascii(sign: str | None) -> str:
    return (sign or '').replace('\u2212', '-')
