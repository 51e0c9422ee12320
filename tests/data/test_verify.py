# SPDX-License-Identifier: Apache-2.0
"""Verification passes what was prepared and finds whatever was changed since."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data.preparing import make_texts, prepare, write_jsonl
from streaming import MDSWriter
from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data.manifest import Manifest, sha256_of
from asymloop_foundry.data.shards import OutputError
from asymloop_foundry.data.verify import verify_split


@pytest.fixture(scope='module', params=['padded', 'packed'])
def split(
    request: pytest.FixtureRequest,
    bpe: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp('split')
    source = write_jsonl(out / 'a.jsonl', make_texts(60))
    prepare(bpe, [source], out, row_format=request.param)
    return out / 'train'


def verify(folder: Path) -> list[str]:
    return list(verify_split(str(folder), progress=False))


def test_a_prepared_split_is_found_right_and_its_samples_are_text(
    split: Path, bpe: PreTrainedTokenizerBase
) -> None:
    lines = list(verify_split(str(split), tokenizer=bpe, samples=2, progress=False))
    assert len(lines) == 3
    assert lines[0].startswith(f'row 0: {make_texts(1)[0][:20]!r}'[:-1])
    assert 'shards match their hashes' in lines[2]


def spoil_byte(folder: Path) -> None:
    path = folder / 'shard.00001.mds.zstd'
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil_count(folder: Path) -> None:
    path = folder / 'manifest.json'
    text = path.read_text()
    manifest = Manifest.from_json(text)
    counts = dataclasses.replace(manifest.counts, eos_kept=manifest.counts.eos_kept + 1)
    path.write_text(dataclasses.replace(manifest, counts=counts).to_json())


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (spoil_byte, r'shard.00001.mds.zstd is damaged'),
        (lambda folder: (folder / 'shard.00000.mds.zstd').unlink(), r'00000.mds.zstd is missing'),
        (lambda folder: (folder / 'manifest.json').unlink(), r'has no manifest.json'),
        (lambda folder: (folder / 'index.json').unlink(), r'has no index.json'),
        (
            lambda folder: (folder / 'index.json').write_text('{"shards": [], "version": 2}'),
            r'index.json is not the one that manifest.json was made with',
        ),
        (spoil_count, r'\d+ eos_kept in the shards, \d+ in manifest.json'),
    ],
)
def test_damage_is_named(
    spoil: Callable[[Path], object], message: str, split: Path, tmp_path: Path
) -> None:
    shutil.copytree(split, tmp_path / 'train')
    spoil(tmp_path / 'train')
    with pytest.raises(OutputError, match=message):
        verify(tmp_path / 'train')


@pytest.mark.parametrize(
    ('row', 'message'),
    [
        ([5] * 10 + [1] + [0] * 21, None),
        ([5] * 32, r'row 0 does not hold one document ending in EOS'),
        ([5, 1, 5, 1] + [0] * 28, r'row 0 does not hold one document ending in EOS'),
        ([5, 400, 1] + [0] * 29, r'ids from 0 to 400, with a vocabulary of 400'),
        ([5, 1], r'not 1 rows of 32 tokens'),
    ],
)
def test_rows_of_another_form_are_found_even_with_right_hashes(
    row: list[int],
    message: str | None,
    bpe: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    manifest = prepare(bpe, [write_jsonl(tmp_path / 'a.jsonl', ['x'])], tmp_path / 'made')
    options = {'compression': 'zstd', 'hashes': ['sha1', 'xxh64']}
    with MDSWriter(columns={'tokens': 'ndarray:int32'}, out=str(tmp_path / 'x'), **options) as out:
        out.write({'tokens': np.array(row, dtype=np.int32)})
    index = (tmp_path / 'x' / 'index.json').read_text()
    real = sum(token != 0 for token in row)
    counts = dataclasses.replace(
        manifest.counts,
        tokens_kept=real,
        tokens_produced=real,
        tokens_padded=len(row) - real,
        eos_kept=row.count(1),
    )
    made = dataclasses.replace(manifest, counts=counts, index_sha256=sha256_of(index))
    (tmp_path / 'x' / 'manifest.json').write_text(made.to_json())
    if message is None:
        verify(tmp_path / 'x')
    else:
        with pytest.raises(OutputError, match=message):
            verify(tmp_path / 'x')


def test_a_manifest_of_another_version_is_not_guessed_at(split: Path, tmp_path: Path) -> None:
    shutil.copytree(split, tmp_path / 'train')
    data = json.loads((split / 'manifest.json').read_text())
    (tmp_path / 'train' / 'manifest.json').write_text(json.dumps({**data, 'format_version': 9}))
    with pytest.raises(ValueError, match=r'format_version 9, not 1'):
        verify(tmp_path / 'train')
