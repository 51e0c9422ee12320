# SPDX-License-Identifier: Apache-2.0
"""What StreamingDataset makes of prepared data: order, resumption, damage, restart after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.preparing import make_texts, prepare, write_jsonl
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data.streaming_fixes import fail_on_unreadable_shards

GLOBAL_BATCH = 16
ROWS = 200


@pytest.fixture(scope='module')
def data(bpe: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp('data')
    prepare(bpe, [write_jsonl(out / 'a.jsonl', make_texts(ROWS))], out)
    return out


def dataset(data: Path, batch_size: int = GLOBAL_BATCH, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        **{'local': str(data), 'split': 'train', **options},
        batch_size=batch_size,
        shuffle=True,
        shuffle_algo='py1e',
        shuffle_seed=6198,
        partition_algo='relaxed',
    )


def global_batches(
    data: Path, nodes: int, ranks: int, workers: int, start: int = 0
) -> list[frozenset[int]]:
    """Sample ids of each step's global batch, however many processes share it."""
    streamed = dataset(data, GLOBAL_BATCH // (nodes * ranks))
    # What the first run, on one node, has written into its checkpoint.
    streamed.num_canonical_nodes = 1
    streamed.initial_physical_nodes = 1
    streamed.shuffle_block_size = 1 << 18
    world = World(nodes, ranks, workers, 0)
    work = generate_work('random', streamed, world, epoch=0, sample_in_epoch=start)
    # A rank takes its workers' batches in turn: (nodes, ranks, workers, batches, size).
    steps = work.transpose(3, 2, 0, 1, 4).reshape(-1, GLOBAL_BATCH)
    return [frozenset(step.tolist()) for step in steps if (step >= 0).all()]


@pytest.mark.parametrize(
    ('nodes', 'ranks', 'workers'), [(1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1)]
)
def test_global_batches_do_not_depend_on_the_number_of_processes(
    nodes: int, ranks: int, workers: int, data: Path
) -> None:
    whole = global_batches(data, 1, 1, 1)
    assert len(whole) == ROWS // GLOBAL_BATCH
    assert len(frozenset().union(*whole)) == len(whole) * GLOBAL_BATCH
    assert global_batches(data, nodes, ranks, workers) == whole
    # And in the middle of an epoch begun on one process.
    done = 5
    resumed = global_batches(data, nodes, ranks, workers, start=done * GLOBAL_BATCH)
    assert resumed == whole[done:]


def test_an_epoch_resumed_in_its_middle_gives_the_rest_of_it(data: Path) -> None:
    def rows(items: Iterator[dict[str, np.ndarray]]) -> list[tuple[int, ...]]:
        return [tuple(item['tokens'].tolist()) for item in items]

    whole = rows(iter(dataset(data)))
    assert len(set(whole)) == ROWS
    first = dataset(data)
    begun = iter(first)
    done = 5 * GLOBAL_BATCH
    start = [next(begun) for _ in range(done)]
    second = dataset(data)
    second.load_state_dict(first.state_dict(done, from_beginning=False))
    assert rows(iter(start)) + rows(iter(second)) == whole


def keep_streaming_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the fixes after the test."""
    for name in ('__iter__', 'prepare_shard'):
        monkeypatch.setattr(StreamingDataset, name, getattr(StreamingDataset, name))


@pytest.mark.parametrize('workers', [0, 2])
def test_a_damaged_shard_is_an_error_and_not_the_end_of_the_epoch(
    workers: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data / 'train', tmp_path / 'remote' / 'train')
    shard = tmp_path / 'remote' / 'train' / 'shard.00001.mds.zstd'
    spoiled = bytearray(shard.read_bytes())
    spoiled[-5] ^= 1
    shard.write_bytes(spoiled)

    def load(name: str) -> int:
        cache, remote = tmp_path / f'{name}-{workers}', str(tmp_path / 'remote')
        streamed = dataset(cache, remote=remote, validate_hash='xxh64')
        return sum(len(batch['tokens']) for batch in DataLoader(streamed, 16, num_workers=workers))

    keep_streaming_as_it_is(monkeypatch)
    if workers == 0:
        # With more processes the others would wait for ever.
        assert load('as it is') < ROWS
    fail_on_unreadable_shards()
    fail_on_unreadable_shards()
    with pytest.raises(RuntimeError, match=r'could not be fetched or is damaged.*--verify'):
        load('fixed')


def test_an_undamaged_epoch_is_the_same_with_the_fix(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_streaming_as_it_is(monkeypatch)
    fail_on_unreadable_shards()
    assert sum(1 for _ in dataset(data)) == ROWS
