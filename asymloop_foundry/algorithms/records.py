# SPDX-License-Identifier: Apache-2.0
"""Small JSON-lines files beside the checkpoints: one object a line, with its ``kind`` and ``batch``."""

import json
import os
from pathlib import Path
from typing import Any

from composer import State
from composer.callbacks import CheckpointSaver
from composer.utils import dist, format_name_with_dist

__all__ = ['RecordFile', 'read_records', 'record_folder_of']


def read_records(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a record file, in order."""
    with open(path, encoding='utf-8') as lines:
        return [json.loads(line) for line in lines if line.strip()]


def record_folder_of(state: State, folder: str | None) -> Path | None:
    """Where this rank keeps records: ``folder``, else beside the checkpoints.

    Returns:
        None on every rank but the first, and where neither a folder nor checkpoints are asked for.
    """
    if dist.get_global_rank() != 0:
        return None
    if folder is None:
        savers = [c for c in state.callbacks if isinstance(c, CheckpointSaver)]
        if not savers:
            return None
        folder = savers[0].folder
    return Path(format_name_with_dist(folder, state.run_name))


class RecordFile:
    """Rows of one run, kept in memory and written whole.

    Rows of batches that a resumed run makes again are dropped, so that a file never holds a batch
    twice.

    Args:
        path: The file.
        batch: Batch at which this run starts; 0 begins a new file.
    """

    _FLUSH_EVERY = 100

    def __init__(self, path: Path, batch: int) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._pending = 0
        if batch > 0 and path.exists():
            self._rows = [row for row in read_records(path) if row['batch'] < batch]

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row, which has a ``batch``; now and then everything is written."""
        self._rows.append(row)
        self._pending += 1
        if self._pending >= self._FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes the file whole, where something is new."""
        if not self._pending:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f'.{self._path.name}.tmp')
        with open(temporary, 'w', encoding='utf-8') as out:
            out.writelines(json.dumps(row, allow_nan=False) + '\n' for row in self._rows)
        os.replace(temporary, self._path)
        self._pending = 0
