# SPDX-License-Identifier: Apache-2.0
"""GSM8K as rows of a prompt and a supervised response (paper, appendix 15).

Prompt and response are encoded here, not by Foundry's loader: that would close the prompt with the
``</s>`` that T5's tokenizer adds to every text, which no prompt has at generation. The collator takes
everything of the prompt out of the loss.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

__all__ = [
    'HUB_NAME',
    'HUB_REVISION',
    'TRAIN_ROWS',
    'Conversion',
    'Gsm8kEncoder',
    'read_questions',
    'solution_text',
    'split_rows',
]

HUB_NAME = 'openai/gsm8k'
HUB_REVISION = 'e53f048856ff4f594e959d75785d2c2d37b678ee'
TRAIN_ROWS = 7473
_ANNOTATION = re.compile(r'<<[^<>]*>>')
# How to write what a vocabulary lacks: T5's has none of these.
_SPELLINGS = {
    '\u00d7': '*',  # multiplication sign
    '÷': '/',
    '\u2212': '-',  # minus sign
    '<': ' is less than ',
    '^': '**',
    '¢': ' cents',
    '¼': ' 1/4',
    '½': ' 1/2',
    '¾': ' 3/4',
    '√': 'sqrt',
    '{': '(',
    '}': ')',
    '`': "'",
    '\u200b': '',
    'ñ': 'n',
    'é': 'e',
}

Row = Mapping[str, str]


@dataclass
class Conversion:
    """What became of the rows of a split.

    Attributes:
        rows: rows read.
        written: rows that can be learned.
        too_long: rows longer than the context, whose answer would be cut off.
        unknown: rows with something in the response that the vocabulary cannot express.
        respelled: written rows in which a character was written otherwise.
        longest: tokens of the longest row written.
    """

    rows: int = 0
    written: int = 0
    too_long: int = 0
    unknown: int = 0
    respelled: int = 0
    longest: int = 0
    dropped_rows: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, int | list[int]]:
        """The counts for a manifest."""
        return asdict(self)


class Gsm8kEncoder:
    """Encodes questions and solutions, the same way for training and for generation.

    Args:
        tokenizer: the model's tokenizer; it must have an EOS token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        missing = [c for c in _SPELLINGS if self._lacks(c)]
        self._spell = str.maketrans({c: _SPELLINGS[c] for c in missing})

    def prompt_ids(self, question: str) -> list[int]:
        """``Question: ...`` and ``Answer:``, without a closing token (T5 reads the newline as a space)."""
        return self._encode(f'Question: {question.strip()}\nAnswer:')

    def response_ids(self, answer: str) -> list[int]:
        """The worked solution with its ``#### NUMBER``, closed by the EOS token."""
        return [*self._encode(f' {solution_text(answer)}'), self.tokenizer.eos_token_id]

    def respells(self, text: str) -> bool:
        """Whether the text has a character that is written otherwise for this vocabulary."""
        return text.translate(self._spell) != text

    def rows(
        self, rows: Iterable[Row], max_seq_len: int, report: Conversion
    ) -> Iterator[dict[str, np.ndarray]]:
        """Encodes rows, leaving out those that cannot be learned.

        Args:
            rows: mappings with ``question`` and ``answer``.
            max_seq_len: N, the most tokens of prompt and response together.
            report: gets the counts.

        Yields:
            ``input_ids`` (the prompt) and ``labels`` (the response), int32, as Foundry's finetuning
            loader reads rows that are encoded already.
        """
        for i, row in enumerate(rows):
            report.rows += 1
            prompt, response = self.prompt_ids(row['question']), self.response_ids(row['answer'])
            n_tokens = len(prompt) + len(response)
            if n_tokens > max_seq_len:
                report.too_long += 1
                report.dropped_rows.append(i)
                continue
            if self._unknown(response):
                report.unknown += 1
                report.dropped_rows.append(i)
                continue
            report.written += 1
            report.respelled += self.respells(row['question'] + solution_text(row['answer']))
            report.longest = max(report.longest, n_tokens)
            yield {
                'input_ids': np.array(prompt, dtype=np.int32),
                'labels': np.array(response, dtype=np.int32),
            }

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text.translate(self._spell), add_special_tokens=False)['input_ids']

    def _lacks(self, character: str) -> bool:
        ids = self.tokenizer(f'a{character}', add_special_tokens=False)['input_ids']
        return self._unknown(ids) or not character.isprintable()

    def _unknown(self, ids: Sequence[int]) -> bool:
        """Whether something was lost; where EOS serves as the unknown token, nothing can be."""
        unk, eos = self.tokenizer.unk_token_id, self.tokenizer.eos_token_id
        return unk is not None and unk != eos and unk in ids


def solution_text(answer: str) -> str:
    """A reference answer without its calculator annotations, ``<<48/2=24>>``."""
    return _ANNOTATION.sub('', answer).strip()


def read_questions(path: str | Path) -> list[Row]:
    """Reads the data set's jsonl.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line is no object with the texts ``question`` and ``answer``.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f'{path} does not exist; give a folder with train.jsonl and test.jsonl of GSM8K.'
        )
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f'{path}:{number} is no JSON: {error}') from error
        if not isinstance(row, dict) or not all(
            isinstance(row.get(key), str) for key in ('question', 'answer')
        ):
            raise ValueError(f'{path}:{number} has no texts `question` and `answer`.')
        rows.append(row)
    return rows


def split_rows(rows: Sequence[Row], dev_indices: Sequence[int]) -> tuple[list[Row], list[Row]]:
    """Training and development rows, in the order of the file.

    Args:
        rows: the training file.
        dev_indices: which of its rows are held out.

    Raises:
        ValueError: the file is not the one that the indices are for.
    """
    if len(rows) != TRAIN_ROWS:
        raise ValueError(
            f'the training file has {len(rows):,} rows; the held-out indices are for the {TRAIN_ROWS:,} '
            f'of {HUB_NAME}.'
        )
    held_out = set(dev_indices)
    train = [row for i, row in enumerate(rows) if i not in held_out]
    return train, [rows[i] for i in sorted(held_out)]
