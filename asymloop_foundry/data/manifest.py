# SPDX-License-Identifier: Apache-2.0
"""The record that lies beside every prepared split and says what its tokens are.

``manifest.json`` stands next to ``index.json``. Its ``request`` is everything that decides the
output's bytes; its ``counts`` say what became of every document and token. Nothing in it depends
on when, where or with how many workers the split was made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST_NAME = 'manifest.json'
INDEX_NAME = 'index.json'
FORMAT_VERSION = 1
ROW_FORMATS = ('padded', 'packed')


@dataclasses.dataclass(frozen=True)
class TokenizerRecord:
    """What identifies a tokenizer, whatever name or folder it was loaded from.

    Attributes:
        name: The name or folder it was loaded from, for people; never compared.
        fingerprint: Hash of its vocabulary and of how it splits a fixed text
            (:func:`asymloop_foundry.data.encoding.fingerprint`).
        vocab_size: Number of entries, added tokens included (``len(tokenizer)``).
        eos_token: The token that ends each document.
        eos_id: Its id.
        pad_token: The token that fills padded rows.
        pad_id: Its id.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos_token: str
    eos_id: int
    pad_token: str
    pad_id: int


@dataclasses.dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        path: Path or URL as it was found.
        size: Bytes.
        digest: The store's own checksum where it has one, else a hash of the file's two ends.
    """

    path: str
    size: int
    digest: str

    @property
    def identity(self) -> tuple[str, int, str]:
        """Name, size and digest: what must agree; the folder may differ."""
        return (self.path.rsplit('/', 1)[-1], self.size, self.digest)


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything that decides a split's bytes.

    Attributes:
        split: Name of the split's folder.
        tokenizer: The tokenizer.
        row_format: ``padded`` (one document a row) or ``packed`` (documents joined by EOS).
        seq_len: Tokens per row.
        text_column: Column or key that holds the text.
        sources: Input files in reading order.
        limit_tokens: Stop after the document that reaches this many real tokens.
        limit_documents: Stop after this many documents.
        on_error: ``raise`` or ``skip`` for what cannot be read.
        rows_per_shard: Rows in each shard but the last.
    """

    split: str
    tokenizer: TokenizerRecord
    row_format: str
    seq_len: int
    text_column: str
    sources: tuple[Source, ...]
    limit_tokens: int | None
    limit_documents: int | None
    on_error: str
    rows_per_shard: int

    def differences(self, other: Request) -> list[str]:
        """Say where another request departs from this one, one line a key.

        Args:
            other: The request to compare.

        Returns:
            Lines ``key: this one's value, not the other's``; empty where both give the same bytes.
        """
        lines = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == 'tokenizer':
                for name in ('fingerprint', 'vocab_size', 'eos_id', 'pad_id'):
                    a, b = getattr(mine, name), getattr(theirs, name)
                    if a != b:
                        lines.append(
                            f'tokenizer.{name}: {a} ({mine.name}), not {b} ({theirs.name})'
                        )
            elif field.name == 'sources':
                lines += _source_differences(mine, theirs)
            elif mine != theirs:
                lines.append(f'{field.name}: {mine}, not {theirs}')
        return lines


def _source_differences(mine: tuple[Source, ...], theirs: tuple[Source, ...]) -> list[str]:
    if len(mine) != len(theirs):
        return [f'sources: {len(mine)} files, not {len(theirs)}']
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a.identity != b.identity:
            return [
                f'sources[{number}]: {a.path} ({a.size} bytes, {a.digest}), '
                f'not {b.path} ({b.size} bytes, {b.digest})'
            ]
    return []


@dataclasses.dataclass
class Counts:
    """What became of every document and token.

    Always ``tokens_produced == tokens_kept + tokens_dropped`` and
    ``rows * seq_len == tokens_kept + tokens_padded``. Tokens include each document's EOS.

    Attributes:
        documents_read: Documents taken from the sources, empty ones included.
        documents_empty: Documents without a single token, left out.
        documents_written: Documents that the rows hold, wholly or in part.
        documents_truncated: Documents that lost their end to the sequence length (``padded``).
        documents_skipped: Documents that could not be read (``on_error: skip``).
        groups_skipped: Files or row groups that could not be read (``on_error: skip``).
        tokens_produced: Tokens of the documents before anything was cut off.
        tokens_kept: Real tokens in the rows.
        tokens_dropped: Tokens cut off by truncation, or left over behind the last packed row.
        tokens_padded: Pads in the rows.
        eos_kept: EOS tokens in the rows.
        rows: Rows written.
    """

    documents_read: int = 0
    documents_empty: int = 0
    documents_written: int = 0
    documents_truncated: int = 0
    documents_skipped: int = 0
    groups_skipped: int = 0
    tokens_produced: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    tokens_padded: int = 0
    eos_kept: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A finished split.

    Attributes:
        request: What was asked.
        counts: What came of it.
        shards: Number of shard files.
        index_sha256: Hash of ``index.json``, which itself holds the hash of every shard.
        skipped: What could not be read, and why (``on_error: skip``), the first hundred.
    """

    request: Request
    counts: Counts
    shards: int
    index_sha256: str
    skipped: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Serialise, the same bytes for the same content."""
        return dumps({'format_version': FORMAT_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what :meth:`to_json` wrote.

        Args:
            text: The file's content.

        Returns:
            The manifest.

        Raises:
            ValueError: It is not a manifest of this format.
        """
        try:
            data = json.loads(text)
            if data['format_version'] != FORMAT_VERSION:
                raise ValueError(f'format_version {data["format_version"]}, not {FORMAT_VERSION}')
            return cls(
                request=request_from_dict(data['request']),
                counts=Counts(**data['counts']),
                shards=data['shards'],
                index_sha256=data['index_sha256'],
                skipped=tuple(data['skipped']),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f'not a manifest of prepared data: {error!r}') from error


def request_from_dict(data: dict[str, Any]) -> Request:
    """Build a request from its ``dataclasses.asdict``.

    Args:
        data: The mapping.

    Returns:
        The request.
    """
    fields = dict(data)
    fields['tokenizer'] = TokenizerRecord(**fields['tokenizer'])
    fields['sources'] = tuple(Source(**source) for source in fields['sources'])
    return Request(**fields)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """Read the manifest in a split's folder.

    Args:
        folder: The folder that holds ``index.json``.

    Returns:
        The manifest, or None where the folder has none (data that another tool made).

    Raises:
        ValueError: There is one and it cannot be understood.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        return Manifest.from_json(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(
            f'{path}: {error}. Prepare the data again with this version of the project.'
        ) from error


def dumps(value: Any) -> str:
    """JSON with sorted keys and a final newline.

    Args:
        value: Anything that JSON holds.

    Returns:
        The text.
    """
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + '\n'


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all, and onto the disk before returning.

    Args:
        path: Where to.
        text: Its content.
    """
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    with open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sha256_of(text: str) -> str:
    """Hash a text.

    Args:
        text: The text.

    Returns:
        Hexadecimal SHA-256 of its UTF-8 bytes.
    """
    return hashlib.sha256(text.encode('utf-8')).hexdigest()
