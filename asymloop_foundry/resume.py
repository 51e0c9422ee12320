# SPDX-License-Identifier: Apache-2.0
"""Makes the same command continue a run whatever ended it, and refuses checkpoints that are not whole.

Composer writes ``ep0-ba400-rank0.pt`` (or the folder ``ep0-ba400`` of a sharded checkpoint) under its final
name and then points ``latest-rank0.pt`` to it. Three accidents make that fail. A run killed during
a save leaves a part of a checkpoint beyond ``latest``, and the next run refuses to start (``FileExistsError
... may conflict with a future checkpoint``). A run killed between the removal of the old ``latest`` and
the making of the new one leaves none, and the next run starts anew. And a full disk or a lost machine
leaves a ``latest`` that is truncated, which no run can load.

A check reads a checkpoint's table of contents, not the checkpoint: a ``.pt`` file is a zip archive,
whose directory is written last and says where each member must lie; a sharded folder has ``.metadata``,
written last too, which says how long each of its files must be.
"""

import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asymloop_foundry.sharded import missing_parts

__all__ = ['check_load_path', 'damage', 'prepare_to_resume']

STEP = re.compile(r'ep(\d+)-ba(\d+)')
SET_ASIDE = 'unfinished-'


def damage(checkpoint: str | Path) -> str | None:
    """What is wrong with a checkpoint, as far as its table of contents and sizes tell.

    Args:
        checkpoint: a ``.pt`` file or the folder of a sharded checkpoint.

    Returns:
        A phrase for an error message; None for a whole checkpoint, and for a file that is no ``.pt``.

    Raises:
        ValueError: the index of a sharded checkpoint names something that no index holds.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return missing_parts(path)
    if path.suffix != '.pt':
        return None
    size = path.stat().st_size
    if size == 0:
        return 'it is empty'
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            beyond = [m.filename for m in archive.infolist() if m.header_offset < 0]
    except (zipfile.BadZipFile, OSError, ValueError, EOFError):
        return f'its {size:,} bytes have no table of contents, so it is truncated or no checkpoint'
    if beyond:
        return f'{len(beyond)} of its {len(names)} members are missing'
    if not any(name.endswith('/data.pkl') for name in names):
        return 'it is an archive without the data.pkl that every checkpoint has'
    return None


def prepare_to_resume(cfg: Mapping[str, Any]) -> None:
    """Leaves ``latest`` pointing to the newest whole checkpoint, on the first rank of a local run.

    Only where the run resumes by itself (``autoresume``) from a local ``save_folder``. Nothing is
    deleted: a damaged ``ep0-ba400-rank0.pt`` becomes ``unfinished-ep0-ba400-rank0.pt``, with a
    warning that names it and the checkpoint that training resumes from.

    Args:
        cfg: Foundry's training configuration.
    """
    path = _resumed_folder(cfg)
    if path is None or not path.is_dir() or int(os.environ.get('RANK', 0)) != 0:
        return
    found = sorted(
        (e for e in path.iterdir() if STEP.match(e.name) and not e.is_symlink()), key=_step
    )
    damaged: list[tuple[Path, str]] = []
    while found and (wrong := damage(found[-1])) is not None:
        damaged.append((found.pop(), wrong))
    before = found[-1] if found else None
    rest = (
        f'training resumes from the one before, {before.name}.'
        if before
        else 'there is no whole one before it: training starts anew.'
    )
    for entry, wrong in damaged:
        aside = _free_name(path / f'{SET_ASIDE}{entry.name}')
        os.replace(entry, aside)
        warnings.warn(
            f'{entry} is not whole: {wrong}. The run that wrote it was stopped meanwhile, or the disk '
            f'lost a part. It is now {aside.name}; {rest}',
            stacklevel=2,
        )
    _point_latest_to(before, path, cfg)


def check_load_path(cfg: Mapping[str, Any]) -> None:
    """Refuses a local ``load_path`` that is missing or not whole, unless a newer ``latest`` replaces it.

    Args:
        cfg: Foundry's training configuration.

    Raises:
        ValueError: naming the path, and the newest whole checkpoint beside it.
    """
    load_path = cfg.get('load_path')
    if load_path is None:
        return
    if not isinstance(load_path, str) or not load_path:
        raise ValueError(
            f'load_path={load_path!r} must be the path of a checkpoint; give one, or leave load_path out.'
        )
    folder = _resumed_folder(cfg)
    if folder is not None and any(
        _is_latest(entry) and entry.exists() for entry in _entries(folder)
    ):
        return
    if '://' in load_path:
        return
    path = Path(load_path.format(run_name=cfg.get('run_name')))
    beside = _newest_whole(path.parent, other_than=path)
    remedy = f'; {beside} is whole' if beside else ''
    if not path.exists():
        raise ValueError(
            f'load_path={load_path!r} does not exist. Give the .pt file that training saved, or the folder '
            f'of a sharded checkpoint{remedy}.'
        )
    wrong = damage(path.resolve())
    if wrong is not None:
        raise ValueError(
            f'load_path={load_path!r} cannot be loaded: {wrong}. Give a whole checkpoint{remedy}.'
        )


def _resumed_folder(cfg: Mapping[str, Any]) -> Path | None:
    folder = cfg.get('save_folder')
    if not cfg.get('autoresume') or not folder or '://' in str(folder):
        return None
    return Path(str(folder).format(run_name=cfg.get('run_name')))


def _point_latest_to(checkpoint: Path | None, folder: Path, cfg: Mapping[str, Any]) -> None:
    """Makes every ``latest`` link lead to ``checkpoint``; without one, links to nothing go."""
    links = [entry for entry in folder.iterdir() if _is_latest(entry)]
    if checkpoint is None:
        for link in links:
            if not link.exists():
                link.unlink()
        return
    if not links:
        sharded = 'latest-sharded-rank0' if checkpoint.is_dir() else 'latest-rank0.pt'
        name = cfg.get('save_latest_filename') or sharded
        links = [folder / str(name).format(rank=0, run_name=cfg.get('run_name'))]
    for link in links:
        if link.is_symlink() and os.readlink(link) == checkpoint.name:
            continue
        temporary = folder / f'.{link.name}.new'
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.name)
        os.replace(temporary, link)


def _newest_whole(folder: Path, other_than: Path) -> Path | None:
    """The newest whole checkpoint of a folder; None where there is none."""
    found = [
        entry
        for entry in _entries(folder)
        if STEP.match(entry.name) and not entry.is_symlink() and entry != other_than
    ]
    return next((e for e in sorted(found, key=_step, reverse=True) if damage(e) is None), None)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _free_name(path: Path) -> Path:
    """The path itself, or with a number where an earlier accident left one of that name."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f'{path.name}.{number}')
    return free


def _is_latest(entry: Path) -> bool:
    return entry.is_symlink() and entry.name.startswith('latest')


def _step(path: Path) -> tuple[int, int]:
    found = STEP.search(path.name)
    return (int(found[1]), int(found[2])) if found else (-1, -1)
