# SPDX-License-Identifier: Apache-2.0
"""Every document once, in a fixed order, and a clear error where one cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstd
from data.preparing import make_texts, prepare, read_rows, write_jsonl
from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data.documents import (
    Block,
    Position,
    SourceError,
    Unreadable,
    decode_block,
)
from asymloop_foundry.data.sources import HUB_REVISION, find_sources, hub_shards, read_blocks

TEXTS = [*make_texts(400), 'naïve\u2028 — line separator inside', 'tab\t"quotes"\\']
LINES = ''.join(json.dumps({'id': 1, 'text': text}, ensure_ascii=False) + '\n' for text in TEXTS)


def write_parquet(path: Path, texts: list[str | None], kind: pa.DataType = pa.string()) -> Path:  # noqa: B008
    column = (
        pa.array(texts, pa.string()).cast(kind) if kind != pa.string() else pa.array(texts, kind)
    )
    pq.write_table(pa.table({'id': range(len(texts)), 'text': column}), path, row_group_size=150)
    return path


def documents(path: str | Path, column: str = 'text', skip: bool = False) -> list[str]:
    blocks = read_blocks(find_sources([str(path)]), column, skip_unreadable=skip)
    return [
        text
        for block in blocks
        if isinstance(block, Block)
        for text in decode_block(block, column, skip).texts
    ]


WRITERS: dict[str, Callable[[Path], object]] = {
    'a.jsonl': lambda path: path.write_text(LINES),
    'b.jsonl.gz': lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    'c.jsonl.zst': lambda path: path.write_bytes(zstd.compress(LINES.encode())),
    'two-members.jsonl.gz': lambda path: path.write_bytes(
        gzip.compress(LINES[:5000].encode()) + gzip.compress(LINES[5000:].encode())
    ),
    'd.parquet': lambda path: write_parquet(path, TEXTS),
    'large.parquet': lambda path: write_parquet(path, TEXTS, pa.large_string()),
    'dictionary.parquet': lambda path: write_parquet(
        path, TEXTS, pa.dictionary(pa.int32(), pa.string())
    ),
    'no-final-newline.jsonl': lambda path: path.write_text(LINES[:-1]),
    'crlf-and-bom.jsonl': lambda path: path.write_bytes(
        b'\xef\xbb\xbf' + LINES.replace('\n', '\r\n').encode()
    ),
    'e.txt': lambda path: path.write_text('\n'.join(TEXTS) + '\n\n'),
    'f.txt.gz': lambda path: path.write_bytes(gzip.compress('\n'.join(TEXTS).encode())),
}


@pytest.mark.parametrize('name', WRITERS)
def test_every_format_gives_the_same_documents(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert documents(tmp_path / name) == TEXTS


@pytest.mark.parametrize('name', ['a.jsonl', 'b.jsonl.gz', 'd.parquet'])
def test_reading_can_start_at_any_block(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('asymloop_foundry.data.sources.BLOCK_BYTES', 10_000)
    monkeypatch.setattr('asymloop_foundry.data.sources.BLOCK_DOCUMENTS', 64)
    for folder in ('one', 'two'):
        (tmp_path / folder).mkdir()
        WRITERS[name](tmp_path / folder / name)
    sources = find_sources([str(tmp_path / 'two'), str(tmp_path / 'one')])
    blocks = list(read_blocks(sources, 'text'))
    assert len(blocks) > 8
    for number, block in enumerate(blocks):
        assert list(read_blocks(sources, 'text', block.position)) == blocks[number:]


def test_a_line_longer_than_a_block_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('asymloop_foundry.data.sources.BLOCK_BYTES', 100)
    texts = ['short', 'x' * 1000, 'end']
    assert documents(write_jsonl(tmp_path / 'a.jsonl', texts)) == texts


def test_a_row_group_is_read_a_few_documents_at_a_time(tmp_path: Path) -> None:
    pq.write_table(pa.table({'text': make_texts(1000)}), tmp_path / 'a.parquet')
    blocks = list(read_blocks(find_sources([str(tmp_path)]), 'text'))
    assert max(len(block.payload) for block in blocks) == 128


def test_order_is_that_of_the_arguments_and_of_names_within_them(tmp_path: Path) -> None:
    for name in ('b/2.jsonl', 'b/1.jsonl', 'b/sub/0.jsonl', 'a/9.jsonl', 'a/notes.md'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    found = find_sources([str(tmp_path / 'b'), f'{tmp_path}/a/*'])
    names = [os.path.relpath(source.path, tmp_path) for source in found]
    assert names == ['b/1.jsonl', 'b/2.jsonl', 'b/sub/0.jsonl', 'a/9.jsonl']
    with pytest.raises(ValueError, match=r'9.jsonl.* is named twice'):
        find_sources([str(tmp_path / 'a'), str(tmp_path / 'a' / '9.jsonl')])


def test_any_fsspec_address_can_be_read(tmp_path: Path) -> None:
    """``s3://``, ``gs://`` and ``hf://`` differ from ``memory://`` by their client alone."""
    write_parquet(tmp_path / 'a.parquet', TEXTS)
    memory = fsspec.filesystem('memory')
    memory.pipe_file('/bucket/x/a.parquet', (tmp_path / 'a.parquet').read_bytes())
    memory.pipe_file('/bucket/x/b.jsonl.gz', gzip.compress(LINES.encode()))
    assert documents('memory://bucket/x') == TEXTS * 2
    assert documents('memory://bucket/x/*.parquet') == TEXTS
    memory.rm('/bucket', recursive=True)


def test_hub_shards_are_addressed_by_number_at_a_pinned_revision() -> None:
    assert hub_shards([0, 233]) == [
        f'hf://datasets/HuggingFaceTB/smollm-corpus@{HUB_REVISION}/fineweb-edu-dedup/'
        f'train-{number}-of-00234.parquet'
        for number in ('00000', '00233')
    ]
    with pytest.raises(ValueError, match=r'shard 234: .*shards 0 to 233'):
        hub_shards([234])


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('missing.parquet', r'missing.parquet.*no such file'),
        ('empty', r'empty.*no file in it ends in .parquet'),
        ('notes.md', r'notes.md.*does not end in .parquet'),
    ],
)
def test_a_source_that_is_not_there_is_named(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'notes.md').touch()
    with pytest.raises(ValueError, match=message):
        find_sources([str(tmp_path / path)])


def test_a_protocol_without_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"source 'nope://bucket/a.parquet' needs a package"):
        find_sources(['nope://bucket/a.parquet'])


def damage_group(path: Path) -> None:
    """Overwrite the middle of the second row group's text."""
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(1)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + chunk.total_compressed_size] = b'\x7f' * chunk.total_compressed_size
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


FAULTS: dict[str, tuple[Callable[[Path], object], str, int]] = {
    # The file, what its error says, and how many documents are left when it is skipped.
    'group.parquet': (
        lambda path: damage_group(write_parquet(path, TEXTS)),
        r'group.parquet, row group 1 cannot be read',
        len(TEXTS) - 150,
    ),
    'cut.parquet': (
        lambda path: truncated(write_parquet(path, TEXTS)),
        r'cut.parquet cannot be read',
        0,
    ),
    'cut.jsonl.gz': (
        lambda path: path.write_bytes(gzip.compress(LINES.encode())[:-200]),
        r'cut.jsonl.gz, after line \d+, cannot be read',
        -1,
    ),
    'bad.jsonl.gz': (
        lambda path: path.write_bytes(b'not gzip at all, not at all'),
        r'bad.jsonl.gz, after line 0, cannot be read',
        0,
    ),
    'bad.jsonl.zst': (
        lambda path: path.write_bytes(zstd.compress(LINES.encode())[:-50]),
        r'bad.jsonl.zst, after line \d+, cannot be read',
        -1,
    ),
    'latin.jsonl': (
        lambda path: path.write_bytes(LINES.encode() + '{"text": "é"}\n'.encode('latin-1')),
        rf'latin.jsonl, line {len(TEXTS) + 1} is not UTF-8',
        len(TEXTS),
    ),
    'broken.jsonl': (
        lambda path: path.write_text('{"text": "a"}\n{"text": \n' + LINES),
        r'broken.jsonl, line 2 is not JSON',
        len(TEXTS) + 1,
    ),
    'key.jsonl': (
        lambda path: path.write_text('{"text": "a"}\n{"body": "b"}\n'),
        r"key.jsonl, line 2 has no text under the key 'text' but 'body'.*--text-column",
        1,
    ),
    'number.jsonl': (
        lambda path: path.write_text('{"text": 5}\n[1]\n{"text": "a"}\n'),
        r'number.jsonl, line 1 has no text',
        1,
    ),
    'surrogate.jsonl': (
        lambda path: path.write_text('{"text": "\\ud800"}\n{"text": "a"}\n'),
        r'surrogate.jsonl, line 1 is not valid Unicode',
        1,
    ),
    'latin.parquet': (
        lambda path: pq.write_table(
            pa.table({'text': pa.array([b'a', b'\xe9', b'c'], pa.binary()).view(pa.string())}), path
        ),
        r'latin.parquet, row group 0, rows 0 to 2 .* is not UTF-8',
        2,
    ),
}


@pytest.mark.parametrize('name', FAULTS)
def test_what_cannot_be_read_is_named_or_skipped_and_counted(
    name: str, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write, message, left = FAULTS[name]
    write(tmp_path / name)
    good = write_jsonl(tmp_path / 'good.jsonl', make_texts(20))
    with pytest.raises(SourceError, match=message):
        prepare(bpe, [tmp_path / name, good], tmp_path / 'out')
    assert not (tmp_path / 'out' / 'train').exists()

    manifest = prepare(bpe, [tmp_path / name, good], tmp_path / 'skipped', on_error='skip')
    counts = manifest.counts
    assert counts.groups_skipped + counts.documents_skipped > 0
    assert name in manifest.skipped[0]
    if left >= 0:
        assert counts.documents_written == left + 20
    else:
        assert counts.documents_written < len(TEXTS) + 20
    assert len(read_rows(tmp_path / 'skipped' / 'train')) == counts.documents_written


@pytest.mark.parametrize(
    ('column', 'message'),
    [
        ('body', r"a.parquet has no column 'body' but 'id', 'text'.*--text-column"),
        ('id', r"a.parquet: the column 'id' holds int64, not text"),
    ],
)
def test_a_column_that_is_not_text_is_named(column: str, message: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / 'a.parquet', TEXTS)
    with pytest.raises(SourceError, match=message):
        documents(tmp_path / 'a.parquet', column)


def test_a_column_of_another_name_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({'body': TEXTS, 'text': TEXTS[::-1]}), tmp_path / 'a.parquet')
    assert documents(tmp_path / 'a.parquet', 'body') == TEXTS


def test_empty_and_null_documents_are_counted_and_left_out(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    write_parquet(tmp_path / 'a.parquet', ['one', '', None, 'two'])
    counts = prepare(bpe, [tmp_path / 'a.parquet'], tmp_path).counts
    assert (counts.documents_read, counts.documents_empty, counts.rows) == (4, 2, 2)


def test_an_unreadable_file_is_reported_at_its_place(tmp_path: Path) -> None:
    write_parquet(tmp_path / 'a.parquet', TEXTS)
    truncated(write_parquet(tmp_path / 'b.parquet', TEXTS))
    blocks = list(read_blocks(find_sources([str(tmp_path)]), 'text', skip_unreadable=True))
    assert isinstance(blocks[-1], Unreadable)
    assert blocks[-1].position == Position(1, 0, 0)
