# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: files in a fixed order, read piece by piece.

A path is a file, a folder or a pattern, local or anywhere fsspec reaches (``hf://``, ``s3://``,
``gs://``). Parquet is read a few documents at a time within each row group, lines (``.jsonl``,
``.txt``, plain or packed with gzip or zstd) in blocks of about a megabyte, so that the size of a
file does not matter. Every block has a position from which reading can start again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from asymloop_foundry.data.documents import (
    Block,
    Position,
    SourceError,
    Unreadable,
    decode_block,
)
from asymloop_foundry.data.manifest import Source

__all__ = [
    'Block',
    'Position',
    'SourceError',
    'Unreadable',
    'decode_block',
    'find_sources',
    'hub_shards',
    'read_blocks',
]

HUB_REPO = 'HuggingFaceTB/smollm-corpus'
HUB_CONFIG = 'fineweb-edu-dedup'
HUB_REVISION = '3ba9d605774198c5868892d7a8deda78031a781f'
HUB_SHARDS = 234

_LINES = ('.jsonl', '.txt')
_PACKED = {'.gz': 'gzip', '.zst': 'zstd'}
SUFFIXES = ('.parquet', *_LINES, *(line + packed for line in _LINES for packed in _PACKED))

# Small enough that a few hundred documents keep many workers busy, large enough that handing them
# over costs nothing.
BLOCK_DOCUMENTS = 128
BLOCK_BYTES = 1 << 20


def hub_shards(numbers: Sequence[int], revision: str = HUB_REVISION) -> list[str]:
    """Addresses of FineWeb-Edu-dedup shards on the hub.

    Args:
        numbers: Shard numbers, 0 to 233.
        revision: Commit of the data set's repository.

    Returns:
        ``hf://`` addresses in the order given.

    Raises:
        ValueError: There is no such shard.
    """
    for number in numbers:
        if not 0 <= number < HUB_SHARDS:
            raise ValueError(
                f'shard {number}: {HUB_REPO} {HUB_CONFIG} has shards 0 to {HUB_SHARDS - 1}.'
            )
    return [
        f'hf://datasets/{HUB_REPO}@{revision}/{HUB_CONFIG}/'
        f'train-{number:05}-of-{HUB_SHARDS:05}.parquet'
        for number in numbers
    ]


def find_sources(paths: Iterable[str]) -> tuple[Source, ...]:
    """Turn files, folders and patterns into a fixed list of files.

    Folders and patterns are expanded in the order of their files' names; arguments keep theirs.

    Args:
        paths: Local paths or fsspec URLs.

    Returns:
        The files.

    Raises:
        ValueError: Something is missing, empty, of an unknown kind, or named twice.
    """
    sources = []
    for path in paths:
        filesystem, inner = _filesystem(path)
        try:
            found = _expand(filesystem, path, inner)
        except FileNotFoundError:
            found = []
        except Exception as error:
            raise ValueError(f'source {path!r} cannot be looked up: {error}') from error
        if not found:
            raise ValueError(
                f'source {path!r}: there is no such file, or no file in it ends in '
                f'{", ".join(SUFFIXES)}.'
            )
        sources += [_describe(filesystem, name) for name in found]
    names = [source.path for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f'source {twice[0]!r} is named twice: its documents would be repeated.')
    return tuple(sources)


def _filesystem(path: str) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f'source {path!r} needs a package that is not installed: {error}'
        ) from error


def _expand(filesystem: Any, path: str, inner: str) -> list[str]:
    if any(character in path for character in '*?['):
        return sorted(name for name in filesystem.glob(inner) if name.endswith(SUFFIXES))
    if filesystem.isdir(inner):
        return sorted(name for name in filesystem.find(inner) if name.endswith(SUFFIXES))
    if not inner.endswith(SUFFIXES):
        raise ValueError(f'it does not end in {", ".join(SUFFIXES)}')
    return [inner] if filesystem.exists(inner) else []


def _describe(filesystem: Any, name: str) -> Source:
    info = filesystem.info(name)
    lfs = info.get('lfs')
    digest = (lfs or {}).get('sha256') if isinstance(lfs, dict) else getattr(lfs, 'sha256', None)
    digest = digest or info.get('ETag') or info.get('etag') or info.get('md5Hash')
    if not digest:
        digest = _ends_digest(filesystem, name, info['size'])
    local = isinstance(filesystem, LocalFileSystem)
    path = name if local else filesystem.unstrip_protocol(name)
    return Source(path=path, size=info['size'], digest=str(digest))


def _ends_digest(filesystem: Any, name: str, size: int, length: int = 1 << 16) -> str:
    """Hash both ends of a file: cheap, and a rewritten file of the same size shows."""
    ends = filesystem.cat_file(name, start=0, end=min(length, size))
    if size > length:
        ends += filesystem.cat_file(name, start=max(length, size - length), end=size)
    return hashlib.sha256(ends).hexdigest()[:32]


def read_blocks(
    sources: Sequence[Source],
    text_column: str,
    start: Position = Position(0, 0, 0),  # noqa: B008
    skip_unreadable: bool = False,
) -> Iterator[Block | Unreadable]:
    """Read all documents in order.

    Args:
        sources: The files.
        text_column: Parquet column that holds the text.
        start: First block to give.
        skip_unreadable: Report what cannot be read instead of failing.

    Yields:
        Blocks, in the same order and with the same bounds whatever ``start`` is.

    Raises:
        SourceError: A file or row group cannot be read.
    """
    for number in range(start.source, len(sources)):
        source = sources[number]
        first = start if number == start.source else Position(number, 0, 0)
        read = _read_parquet if source.path.endswith('.parquet') else _read_lines
        yield from read(source, number, text_column, first, skip_unreadable)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, pa.ArrowException) as error:
        raise SourceError(f'{where} cannot be read: {error}') from error


def _read_parquet(
    source: Source, number: int, column: str, first: Position, skip: bool
) -> Iterator[Block | Unreadable]:
    filesystem, inner = _filesystem(source.path)
    file: pq.ParquetFile | None = None
    try:
        with _naming(source.path):
            file = pq.ParquetFile(filesystem.open(inner, 'rb'), buffer_size=BLOCK_BYTES)
    except SourceError as error:
        if not skip:
            raise
        yield Unreadable(Position(number, 0, 0), str(error))
        return
    with file:
        _check_column(file.schema_arrow, column, source.path)
        for group in range(first.group, file.num_row_groups):
            begin = first.block if group == first.group else 0
            try:
                yield from _read_group(file, source.path, column, Position(number, group, begin))
            except SourceError as error:
                if not skip:
                    raise
                yield Unreadable(Position(number, group, begin), str(error))


def _check_column(schema: pa.Schema, column: str, path: str) -> None:
    if column not in schema.names:
        raise SourceError(
            f'{path} has no column {column!r} but {", ".join(map(repr, schema.names))}: name the '
            'one that holds the text with --text-column.'
        )
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value)):
        raise SourceError(
            f'{path}: the column {column!r} holds {kind}, not text: name another with '
            '--text-column.'
        )


def _read_group(file: pq.ParquetFile, path: str, column: str, first: Position) -> Iterator[Block]:
    where = f'{path}, row group {first.group}'
    with _naming(where):
        batches = file.iter_batches(
            batch_size=BLOCK_DOCUMENTS, row_groups=[first.group], columns=[column]
        )
        row = 0
        for block, batch in enumerate(batches):
            if block >= first.block:
                yield Block(
                    position=first._replace(block=block),
                    where=f'{where}, rows {row} to {row + len(batch) - 1}',
                    kind='texts',
                    payload=_texts(batch.column(0)),
                )
            row += len(batch)


def _texts(column: pa.Array) -> list[str | bytes | None]:
    """Python strings; bytes for whatever is not UTF-8, which parquet does not check."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.view(
            pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        )
        return [_decoded(value) for value in raw.to_pylist()]


def _decoded(value: bytes | None) -> str | bytes | None:
    if value is None:
        return None
    try:
        return value.decode('utf-8')
    except UnicodeDecodeError:
        return value


def _read_lines(
    source: Source, number: int, column: str, first: Position, skip: bool
) -> Iterator[Block | Unreadable]:
    del column  # the workers look for it in each line
    kind = 'txt' if '.txt' in os.path.basename(source.path) else 'jsonl'
    block = 0
    try:
        with _naming(source.path):
            stream = _open_stream(source.path)
        with stream:
            for line, payload in _line_blocks(stream, source.path):
                if block >= first.block:
                    yield Block(
                        position=Position(number, 0, block),
                        where=source.path,
                        kind=kind,
                        payload=payload,
                        first_line=line,
                    )
                block += 1
    except SourceError as error:
        if not skip:
            raise
        yield Unreadable(Position(number, 0, block), str(error))


def _open_stream(path: str) -> IO[bytes] | pa.NativeFile:
    filesystem, inner = _filesystem(path)
    file = filesystem.open(inner, 'rb')
    packed = _PACKED.get(os.path.splitext(path)[1])
    return pa.CompressedInputStream(file, packed) if packed else file


def _line_blocks(stream: Any, path: str) -> Iterator[tuple[int, bytes]]:
    """Cut a stream into blocks of whole lines; the last may lack its newline.

    Yields:
        The number of a block's first line, from 1, and the block.
    """
    held: list[bytes] = []
    line = 1
    while True:
        with _naming(f'{path}, after line {line - 1},'):
            data = stream.read(BLOCK_BYTES)
        if not data:
            break
        cut = data.rfind(b'\n') + 1
        if not cut:
            held.append(data)
            continue
        block = b''.join([*held, data[:cut]])
        yield line, block
        line += block.count(b'\n')
        held = [data[cut:]] if cut < len(data) else []
    if held:
        yield line, b''.join(held)
