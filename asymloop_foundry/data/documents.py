# SPDX-License-Identifier: Apache-2.0
"""Blocks of documents, and the texts in them.

Worker processes import this module and little else, so it keeps to the standard library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import NamedTuple


class SourceError(RuntimeError):
    """A source cannot be read; the message names the file and the place."""


class Position(NamedTuple):
    """Where a block lies: file, row group (0 for lines), block within it."""

    source: int
    group: int
    block: int


@dataclasses.dataclass(frozen=True)
class Block:
    """Some documents, not yet decoded.

    Attributes:
        position: Where it lies.
        where: The same in words, for messages.
        kind: ``texts``, ``jsonl`` or ``txt``.
        payload: The texts (None for a null), or complete lines.
        first_line: Number of the first line, from 1.
    """

    position: Position
    where: str
    kind: str
    payload: list[str | bytes | None] | bytes
    first_line: int = 1


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A file or row group that was passed over.

    Attributes:
        position: Where it lies.
        reason: What is wrong with it.
    """

    position: Position
    reason: str


@dataclasses.dataclass
class Documents:
    """A block's documents.

    Attributes:
        texts: The texts; empty for a null.
        skipped: Documents that could not be read.
        reason: What was wrong with the first of them.
    """

    texts: list[str]
    skipped: int = 0
    reason: str | None = None


def decode_block(block: Block, text_column: str, skip_unreadable: bool) -> Documents:
    """Decode a block.

    Args:
        block: The block.
        text_column: Key of a JSON line that holds the text.
        skip_unreadable: Count what cannot be read instead of failing.

    Returns:
        Its documents in order. A line of ``.txt`` is a document; blank lines are none.

    Raises:
        SourceError: A line is not UTF-8, not JSON, or has no text.
    """
    documents = Documents(texts=[])
    for place, value in _values(block):
        try:
            text = _text_of(block, value, text_column, place)
        except SourceError as error:
            if not skip_unreadable:
                raise
            documents.skipped += 1
            documents.reason = documents.reason or str(error)
        else:
            if text is not None:
                documents.texts.append(text)
    return documents


def _values(block: Block) -> Iterator[tuple[str, str | bytes | None]]:
    if not isinstance(block.payload, bytes):
        for row, value in enumerate(block.payload):
            yield f'{block.where} (the {row + 1}. of them)', value
        return
    lines = block.payload.split(b'\n')
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, block.first_line):
        if number == 1:
            line = line.removeprefix(b'\xef\xbb\xbf')
        yield f'{block.where}, line {number}', line


def _text_of(block: Block, value: str | bytes | None, column: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or ''
    try:
        line = value.decode('utf-8')
    except UnicodeDecodeError as error:
        raise SourceError(f'{where} is not UTF-8: {error}') from error
    if block.kind == 'txt':
        return line.removesuffix('\r') if line.strip() else None
    if not line.strip():
        return None
    try:
        row = json.loads(line)
        # A lone surrogate is valid JSON, and no text.
        text = row[column]
        if text is not None:
            text.encode('utf-8')
    except json.JSONDecodeError as error:
        raise SourceError(f'{where} is not JSON: {error}') from error
    except UnicodeEncodeError as error:
        raise SourceError(f'{where} is not valid Unicode: {error}') from error
    except (KeyError, TypeError, AttributeError) as error:
        keys = ', '.join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise SourceError(
            f'{where} has no text under the key {column!r} but {keys}: name the one that holds it '
            'with --text-column.'
        ) from error
    return text or ''
