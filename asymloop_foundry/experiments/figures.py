# SPDX-License-Identifier: Apache-2.0
"""Figures 3 and 4 of the paper, drawn from the records that training runs keep."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algorithms.alrs import RECORD_FILE as RATES_FILE
from ..algorithms.records import read_records
from ..callbacks.spectrum_monitor import RECORD_FILE as SPECTRA_FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['add_parser', 'draw_learning_rates', 'draw_stable_ranks', 'find_records', 'run']

# A group keeps its colour over panels and runs.
_COLOURS = {'encoder': 'tab:blue', 'decoder': 'tab:red', 'layers': 'tab:green'}
_DASHES = {'attention': '-', 'ffn': '--', 'global': ':'}

Rows = Sequence[Mapping[str, Any]]


def find_records(run_folder: str | os.PathLike, name: str) -> Path | None:
    """The record file of a run: in its folder, or in one below it, such as its checkpoints'.

    Raises:
        ValueError: The folder does not exist, or holds more than one such file.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise ValueError(f'{folder} is not a folder; give the save_folder of a training run.')
    found = sorted(folder.rglob(name))
    if len(found) > 1:
        raise ValueError(
            f'{folder} holds {len(found)} files named {name} ({found[0]}, {found[1]}, ...); give '
            'the folder of one run.'
        )
    return found[0] if found else None


def _new_figure(rows: int, columns: int) -> 'Figure':
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'asymloop-foundry[figures]'."
        ) from error
    return Figure(figsize=(4.5 * columns, 3.2 * rows), layout='constrained')


def _series(rows: Rows, field: str, key: str) -> tuple[list[int], list[float]]:
    found = [(row['batch'], row[field][key]) for row in rows if key in row[field]]
    return [batch for batch, _ in found], [value for _, value in found]


def _keys(rows: Rows, field: str) -> list[str]:
    return sorted({key for row in rows for key in row[field]})


def draw_learning_rates(runs: Mapping[str, Rows]) -> 'Figure':
    """Figure 3: mean learning rates by stack and kind above, decoder-to-encoder ratios below.

    Args:
        runs: Rows of ``alrs.jsonl`` by the label of the run; one column each.

    Raises:
        ValueError: A run has no row of learning rates.
    """
    figure = _new_figure(2, len(runs))
    axes = figure.subplots(2, len(runs), squeeze=False, sharex='col')
    for column, (label, all_rows) in enumerate(runs.items()):
        rows = [row for row in all_rows if row['kind'] == 'lr']
        if not rows:
            raise ValueError(f'{label}: {RATES_FILE} holds no learning rates yet.')
        upper, lower = axes[0, column], axes[1, column]
        upper.plot(
            [row['batch'] for row in rows],
            [row['base'] for row in rows],
            color='0.6',
            label='base',
        )
        for key in _keys(rows, 'mean'):
            stack, kind = key.split('/')
            upper.plot(
                *_series(rows, 'mean', key),
                color=_COLOURS[stack],
                linestyle=_DASHES[kind],
                label=f'{stack} {kind}',
            )
        for kind in _keys(rows, 'ratio'):
            lower.plot(
                *_series(rows, 'ratio', kind), color='black', linestyle=_DASHES[kind], label=kind
            )
        lower.axhline(1.0, color='0.8', zorder=0)
        upper.set_title(label)
        lower.set_xlabel('optimizer steps')
        upper.legend(fontsize='x-small')
        if lower.get_legend_handles_labels()[1]:
            lower.legend(fontsize='x-small')
    axes[0, 0].set_ylabel('mean learning rate')
    axes[1, 0].set_ylabel('decoder / encoder')
    return figure


def draw_stable_ranks(runs: Mapping[str, Rows]) -> 'Figure':
    """Figure 4: normalised stable rank over training, a panel per group and a line per run.

    Args:
        runs: Rows of ``spectra.jsonl`` by the label of the run.

    Raises:
        ValueError: No run has a row.
    """
    groups = sorted(
        {key for rows in runs.values() for key in _keys(rows, 'mean_stable_rank')},
        key=lambda key: (key.endswith('/global'), key),
    )
    if not groups:
        raise ValueError(f'{", ".join(runs)}: {SPECTRA_FILE} holds no measurement yet.')
    figure = _new_figure(1, len(groups))
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, group in zip(axes, groups, strict=True):
        for label, rows in runs.items():
            batches, values = _series(rows, 'mean_stable_rank', group)
            if batches:
                axis.plot(batches, values, label=label)
        axis.set_title(group.replace('/', ' '))
        axis.set_xlabel('optimizer steps')
        axis.legend(fontsize='x-small')
    axes[0].set_ylabel('normalised stable rank')
    return figure


def _save(figure: 'Figure', path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.tmp')
    figure.savefig(temporary, format='png', dpi=150)
    os.replace(temporary, path)


def _labelled(folders: Sequence[str]) -> dict[str, str]:
    """Folder by label, from ``LABEL=FOLDER`` or from a folder alone."""
    labelled: dict[str, str] = {}
    for given in folders:
        label, equals, folder = given.partition('=')
        if not equals:
            label, folder = str(Path(given)), given
        if label in labelled:
            raise ValueError(f'{label} is given twice; name runs as LABEL=FOLDER.')
        labelled[label] = folder
    return labelled


def add_parser(commands: Any) -> None:
    """Adds ``figures`` to the sub-commands of ``python -m asymloop_foundry.experiments``."""
    parser = commands.add_parser(
        'figures',
        help='Figures 3 and 4 from the records of training runs',
        description=(
            'Draws figure3.png (mean learning rates, from alrs.jsonl) and figure4.png (normalised '
            'stable rank, from spectra.jsonl) from the records of training runs.'
        ),
    )
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help='save_folder of a run, or LABEL=FOLDER',
    )
    parser.add_argument('--out', default='.', help='folder of the pictures (default: here)')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Draws what the records allow and prints the paths.

    Raises:
        ValueError: No run holds a record.
    """
    folders = _labelled(arguments.runs)
    drawn = []
    for name, picture, draw in (
        (RATES_FILE, 'figure3.png', draw_learning_rates),
        (SPECTRA_FILE, 'figure4.png', draw_stable_ranks),
    ):
        found = {label: find_records(folder, name) for label, folder in folders.items()}
        runs = {label: read_records(path) for label, path in found.items() if path is not None}
        if runs:
            path = Path(arguments.out) / picture
            _save(draw(runs), path)
            drawn.append(path)
            missing = [label for label in folders if label not in runs]
            print(path, *(f'(without {label}: no {name})' for label in missing))
    if not drawn:
        raise ValueError(
            f'{", ".join(folders.values())}: neither {RATES_FILE} nor {SPECTRA_FILE} found. Train '
            'with algorithms.alrs or callbacks.spectrum_monitor, and with a save_folder.'
        )
