# SPDX-License-Identifier: Apache-2.0
"""Figures 2, 5 and 6 of the paper, and differences of CE, from collected results: PNG, and numbers as CSV."""

import argparse
import csv
import io
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_text
from ..models.flops import training_flops
from .differences import difference_points
from .paper import ACCURACY_BY_SCALE, ACCURACY_COLUMNS, ARCHITECTURES, DEPTH_PPL, DEPTH_PPL_EXPONENT
from .results import Record, load_results, values
from .runs import RUNS, SCALES, Run
from .systems import config_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ['FIGURES', 'add_parser', 'figure2_points', 'figure5_points', 'figure6_points']

Point = dict[str, Any]
COLOURS = {'dense': 'tab:gray', 'full-loop': 'tab:blue', 'asymloop': 'tab:red'}
NAMES = {'dense': 'Dense', 'full-loop': 'Full Loop', 'asymloop': 'AsymLoop'}
# Depth L, 2L and 3L: the iterations of each system (Dense has one depth).
DEPTHS = {
    'dense': {'L': 1},
    'full-loop': {'2L': 2, '3L': 3},
    'asymloop': {'L': 1, '2L': 3, '3L': 5},
}
SEQUENCES_PER_STEP = {'paper': 512, 'tiny': 32}


def figure2_points(records: Sequence[Record], scale: str = 'paper') -> list[Point]:
    """CE of Dense, Full Loop K = 2 and AsymLoop K = 3 by parameters and by token positions.

    The paper's CE comes from Table 3's PPL, taken off that table's scale (1B Dense is not printed).
    """
    points = []
    for run in _main_runs({'dense': 1, 'full-loop': 2, 'asymloop': 3}):
        ppl = DEPTH_PPL.get((run.scale, run.system, run.k))
        points.append(
            {
                'scale': run.scale,
                'system': run.system,
                'k': run.k,
                'parameters': run.parameters(scale),
                'tokens': _positions(run, scale),
                'ce': _mean(values(records, run.name, 'ce', scale)),
                'paper_ce': None if ppl is None else math.log(ppl) / DEPTH_PPL_EXPONENT,
            }
        )
    return points


def figure5_points(records: Sequence[Record], scale: str = 'paper') -> list[Point]:
    """Mean zero-shot accuracy by training FLOPs at depths L, 2L and 3L.

    FLOPs are those of Table 9's rule (full attention matrices) for forward and backward pass, without
    recomputation, over the whole run. The paper prints the accuracies of Table 1 only.
    """
    points = []
    for system, depths in DEPTHS.items():
        for depth, k in depths.items():
            for run in _main_runs({system: k}):
                config = config_of(run.system, run.size(scale), run.k)
                per_row = training_flops(config, 1, config.max_seq_len)
                printed = ACCURACY_BY_SCALE[0][run.scale, system] if k == _paper_k(system) else None
                points.append(
                    {
                        'scale': run.scale,
                        'system': system,
                        'depth': depth,
                        'k': k,
                        'training_flops': per_row * run.n_steps(scale) * SEQUENCES_PER_STEP[scale],
                        'accuracy': _mean(values(records, run.name, 'acc/avg/0', scale)),
                        'paper_accuracy': None if printed is None else printed[-1],
                    }
                )
    return points


def figure6_points(records: Sequence[Record], scale: str = 'paper') -> list[Point]:
    """Zero-shot accuracy by task along the training of Full Loop and AsymLoop at 1B."""
    points = []
    for record in records:
        run = RUNS[record['run']]
        if record['scale'] != scale or run.name not in ('1b-full-loop-k2', '1b-asymloop-k3'):
            continue
        for entry in record.get('accuracy_along', []):
            by_task = dict(entry.get('0', {}))
            if all(task in by_task for task in ACCURACY_COLUMNS if task != 'avg'):
                by_task['avg'] = statistics.fmean(by_task.values())
            points += [
                {
                    'system': run.system,
                    'seed': record['seed'],
                    'step': entry['step'],
                    'task': task,
                    'accuracy': by_task[task],
                }
                for task in ACCURACY_COLUMNS
                if task in by_task
            ]
    return points


def add_parser(commands: Any) -> None:
    """Adds ``result-figures`` to the sub-commands of ``python -m asymloop_foundry.experiments``."""
    parser = commands.add_parser(
        'result-figures',
        help='Figures 2, 5 and 6 and differences of CE from collected results',
        description='Draws figure2, figure5, figure6 and differences (.png and .csv) from a file of `collect`.',
    )
    parser.add_argument('results', type=Path, help='what `collect` wrote')
    parser.add_argument('--scale', choices=SCALES, default='paper')
    parser.add_argument('--out', type=Path, default=Path('.'), help='folder (default: here)')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Draws what the results allow, and says what they lack.

    Raises:
        ValueError: the results allow none of the figures.
    """
    records = load_results(arguments.results)
    drawn = 0
    for name, (points_of, draw, measured) in FIGURES.items():
        points = points_of(records, arguments.scale)
        if not any(point[measured] is not None for point in points):
            print(f'{name}: no run in {arguments.results} has its {measured} at {arguments.scale}')
            continue
        write_text(arguments.out / f'{name}.csv', _csv(points))
        _save(draw(points), arguments.out / f'{name}.png')
        print(f'wrote {arguments.out / name}.png and .csv')
        drawn += 1
    if not drawn:
        raise ValueError(f'{arguments.results} has nothing to draw at --scale {arguments.scale}.')


def draw_figure2(points: Sequence[Point]) -> 'Figure':
    """CE by parameters and by tokens; the paper's points hollow."""
    figure = _new_figure(2)
    for axes, quantity in zip(figure.axes, ('parameters', 'tokens'), strict=True):
        for system in NAMES:
            _line(axes, _of(points, system), quantity, 'ce', 'paper_ce', system, NAMES[system])
        axes.set(xlabel=quantity, ylabel='validation CE', xscale='log')
    figure.axes[0].legend()
    return figure


def draw_figure5(points: Sequence[Point]) -> 'Figure':
    """Accuracy by training FLOPs, a panel for each depth; the paper's points hollow."""
    figure = _new_figure(3)
    for axes, depth in zip(figure.axes, ('L', '2L', '3L'), strict=True):
        at_depth = [point for point in points if point['depth'] == depth]
        for system in NAMES:
            mine = _of(at_depth, system)
            if mine:
                label = f'{NAMES[system]}, K = {mine[0]["k"]}'
                _line(axes, mine, 'training_flops', 'accuracy', 'paper_accuracy', system, label)
        axes.set(
            title=f'depth {depth}',
            xlabel='training FLOPs',
            ylabel='zero-shot acc (%)',
            xscale='log',
        )
        if axes.lines:
            axes.legend()
    return figure


def draw_figure6(points: Sequence[Point]) -> 'Figure':
    """Accuracy along training, a panel for each task and their mean."""
    figure = _new_figure(4, rows=2)
    for axes, task in zip(figure.axes, ACCURACY_COLUMNS, strict=True):
        for system in NAMES:
            for seed in sorted({point['seed'] for point in points}):
                mine = [p for p in _of(points, system) if p['task'] == task and p['seed'] == seed]
                if mine:
                    steps = [point['step'] for point in mine]
                    accuracies = [point['accuracy'] for point in mine]
                    axes.plot(steps, accuracies, color=COLOURS[system], label=NAMES[system])
        axes.set(title=task, xlabel='step', ylabel='zero-shot acc (%)')
    figure.axes[0].legend()
    return figure


def draw_differences(points: Sequence[Point]) -> 'Figure':
    """CE less Dense's, a line for each run that has one; the paper's points hollow."""
    measured = [point for point in reversed(points) if point['difference'] is not None]
    figure = _new_figure(1, width=7.0)
    [axes] = figure.axes
    rows = range(len(measured))
    axes.axvline(0, color='tab:gray', linewidth=0.8)
    axes.errorbar(
        [point['difference'] for point in measured],
        rows,
        xerr=[point['spread'] or 0 for point in measured],
        fmt='o',
        color='tab:red',
        label='here (standard deviation over seeds)',
    )
    axes.plot(
        [point['paper_difference'] for point in measured],
        rows,
        'o',
        color='tab:gray',
        markerfacecolor='none',
        label='paper',
    )
    axes.set_yticks(rows, [point['run'] for point in measured])
    axes.set(xlabel='validation CE less that of Dense')
    figure.legend(loc='outside upper center', ncols=2)
    return figure


FIGURES = {
    'figure2': (figure2_points, draw_figure2, 'ce'),
    'figure5': (figure5_points, draw_figure5, 'accuracy'),
    'figure6': (figure6_points, draw_figure6, 'accuracy'),
    'differences': (difference_points, draw_differences, 'difference'),
}


def _main_runs(systems: Mapping[str, int]) -> Iterator[Run]:
    """The runs of Tables 1 and 3 with these systems and iterations, by scale."""
    for scale in ARCHITECTURES:
        for system, k in systems.items():
            name = f'{scale}-{system}' if system == 'dense' else f'{scale}-{system}-k{k}'
            if name in RUNS:
                yield RUNS[name]


def _paper_k(system: str) -> int:
    return {'dense': 1, 'full-loop': 2, 'asymloop': 3}[system]


def _positions(run: Run, scale: str) -> int:
    return run.n_steps(scale) * SEQUENCES_PER_STEP[scale] * run.size(scale).max_seq_len


def _mean(by_seed: Mapping[int, float]) -> float | None:
    return statistics.fmean(by_seed.values()) if by_seed else None


def _of(points: Sequence[Point], system: str) -> list[Point]:
    return [point for point in points if point['system'] == system]


def _line(
    axes: 'Axes',
    points: Sequence[Point],
    x: str,
    ours: str,
    paper: str,
    system: str,
    label: str,
) -> None:
    styles = ((ours, '-', COLOURS[system], label), (paper, ':', 'none', f'{label} (paper)'))
    for quantity, dash, face, name in styles:
        known = sorted((p[x], p[quantity]) for p in points if p[quantity] is not None)
        if known:
            xs, ys = zip(*known, strict=True)
            axes.plot(
                xs, ys, dash, marker='o', color=COLOURS[system], markerfacecolor=face, label=name
            )


def _new_figure(columns: int, rows: int = 1, width: float = 4.2) -> 'Figure':
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "figures need matplotlib: pip install 'asymloop-foundry[figures]'."
        ) from error
    figure = Figure(figsize=(width * columns, 3.4 * rows), layout='constrained')
    figure.subplots(rows, columns)
    return figure


def _csv(points: Sequence[Point]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(points[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()


def _save(figure: 'Figure', path: Path) -> None:
    temporary = path.with_name(f'.{path.name}.tmp')
    figure.savefig(temporary, format='png', dpi=150)
    os.replace(temporary, path)
