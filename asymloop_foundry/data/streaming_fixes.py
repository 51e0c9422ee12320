# SPDX-License-Identifier: Apache-2.0
"""Two faults of mosaicml-streaming 0.12 that can cost a run, worked round in one place.

**Shared memory of killed runs.** StreamingDataset registers its local folders in shared memory, and
its locks in the temporary folder. A run that is killed together with its helpers leaves both, and
the next run passes over them. But where the locks are gone and the memory is not (a container of
its own ``/tmp`` on a host's ``/dev/shm``), the next run that streams the same remote data into the
same folder is refused ("Reused local directory": github.com/mosaicml/streaming issues 717, 767, 781
and 802), and every killed run keeps a little memory. streaming's own ``clean_stale_shared_memory``
removes every entry, those of other runs on the machine included, and starts ``torch.distributed``
to do so (issue 663). :func:`remove_dead_shared_memory` removes only what no living process has
mapped.

**Unreadable shards.** When a shard cannot be fetched or fails its hash, the thread that prepares
shards dies. The process it belonged to takes that for the end of the epoch and trains on what came
before, again and again; every other process waits for the shard for ever.
:func:`fail_on_unreadable_shards` makes it an error in all processes of a machine.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHM = Path('/dev/shm')
_NAME = re.compile(
    r'\d{6}_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume|'
    r'epoch_shape|epoch_data)'
)

# Not one of streaming's own shard states (1 to 4).
_UNREADABLE = 255


def remove_dead_shared_memory() -> list[str]:
    """Remove streaming's shared memory that no process uses any more.

    Call it in one process per machine, before the first StreamingDataset is built. Does nothing
    where shared memory is not a folder (anything but Linux), and leaves alone what belongs to
    other users.

    Returns:
        Names of what was removed.
    """
    try:
        entries = [entry for entry in os.scandir(_SHM) if _NAME.fullmatch(entry.name)]
        candidates = {entry.name for entry in entries if entry.stat().st_uid == os.getuid()}
    except FileNotFoundError:
        return []
    if not candidates:
        return []
    removed = sorted(candidates - _mapped_names())
    for name in removed:
        (_SHM / name).unlink(missing_ok=True)
    return removed


def _mapped_names() -> set[str]:
    """Names of all shared memory that living processes have mapped."""
    names: set[str] = set()
    for process in Path('/proc').glob('[0-9]*'):
        try:
            maps = (process / 'maps').read_text(errors='replace')
        except OSError:
            # It has ended, or is another user's and cannot have mapped ours.
            continue
        names.update(re.findall(rf'{_SHM}/(\w+)', maps))
    return names


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
