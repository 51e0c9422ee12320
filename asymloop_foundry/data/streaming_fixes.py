# SPDX-License-Identifier: Apache-2.0
"""A fault of mosaicml-streaming 0.12 that can cost a run, worked round in one place.

When a shard cannot be fetched or fails its hash, the thread that prepares shards dies. The process it
belonged to takes that for the end of the epoch and trains on what came before, again and again; every
other process waits for the shard for ever. :func:`fail_on_unreadable_shards` makes it an error in all
processes of a machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

# Not one of streaming's own shard states (1 to 4).
_UNREADABLE = 255


def fail_on_unreadable_shards() -> None:
    """Let every StreamingDataset of this process and its workers raise where a shard is unreadable.

    Call it before the first data loader is built; calling it again changes nothing.
    """
    from streaming import StreamingDataset

    iterate, prepare_shard = StreamingDataset.__iter__, StreamingDataset.prepare_shard
    if getattr(iterate, 'fails_on_unreadable_shards', False):
        return

    def prepare_or_mark(self: Any, shard_id: int, blocking: bool = True) -> None:
        try:
            prepare_shard(self, shard_id, blocking)
        except Exception:
            # The states are shared, so that the others hear of it too.
            self._shard_states[shard_id] = _UNREADABLE
            raise

    def iterate_or_fail(self: Any) -> Iterator[dict[str, Any]]:
        done = threading.Event()
        threading.Thread(target=_watch, args=(self, done), daemon=True).start()
        try:
            yield from iterate(self)
        finally:
            done.set()
        if self._event.is_set():
            raise RuntimeError(
                'a shard of '
                + ', '.join(sorted({str(stream.local) for stream in self.streams}))
                + ' could not be fetched or is damaged (an error above names it). Check the data '
                'with convert_fineweb.py --verify, remove the local copy of that shard, and resume.'
            )

    iterate_or_fail.fails_on_unreadable_shards = True  # type: ignore[attr-defined]
    StreamingDataset.__iter__ = iterate_or_fail
    StreamingDataset.prepare_shard = prepare_or_mark


def _watch(dataset: Any, done: threading.Event) -> None:
    """Stop a process's iteration when any process has met an unreadable shard."""
    while not done.wait(1.0):
        if (dataset._shard_states.numpy() == _UNREADABLE).any():
            dataset._event.set()
            return
