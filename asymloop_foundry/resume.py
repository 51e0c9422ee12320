# SPDX-License-Identifier: Apache-2.0
"""Makes the same command continue a run that was killed while it wrote a checkpoint.

Composer writes ``ep0-ba400-rank0.pt`` under its final name and then points ``latest-rank0.pt`` to it.
Killed in between, the next run resumes from the older ``latest`` and refuses to start, because a file
of a step to come is in its way (``FileExistsError ... may conflict with a future checkpoint``).
"""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP = re.compile(r'ep(\d+)-ba(\d+)')
UNFINISHED = 'unfinished-'


def set_unfinished_checkpoints_aside(cfg: Mapping[str, Any]) -> None:
    """Renames the checkpoints that ``latest`` does not yet reach, on the first rank of a local run.

    Only where the run resumes by itself (``autoresume``) from a local ``save_folder``. Nothing is
    deleted: ``ep0-ba400-rank0.pt`` becomes ``unfinished-ep0-ba400-rank0.pt``.

    Args:
        cfg: Foundry's training configuration.
    """
    folder = cfg.get('save_folder')
    if not cfg.get('autoresume') or not folder or '://' in str(folder):
        return
    if int(os.environ.get('RANK', 0)) != 0:
        return
    path = Path(str(folder).format(run_name=cfg.get('run_name')))
    if not path.is_dir():
        return
    reached = max(
        (_step(Path(os.readlink(entry))) for entry in path.iterdir() if _is_latest(entry)),
        default=(-1, -1),
    )
    for entry in sorted(path.iterdir()):
        if entry.is_symlink() or not STEP.match(entry.name) or _step(entry) <= reached:
            continue
        os.replace(entry, path / f'{UNFINISHED}{entry.name}')
        warnings.warn(
            f'{entry} is newer than the latest complete checkpoint: the run that wrote it was stopped '
            f'meanwhile. It is now {UNFINISHED}{entry.name}; training resumes from the one before.',
            stacklevel=2,
        )


def _is_latest(entry: Path) -> bool:
    return entry.is_symlink() and entry.name.startswith('latest')


def _step(path: Path) -> tuple[int, int]:
    found = STEP.search(path.name)
    return (int(found[1]), int(found[2])) if found else (-1, -1)
