# SPDX-License-Identifier: Apache-2.0
"""By how much each run's cross-entropy differs from Dense's, in the paper and here."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from .paper import DEPTH_PPL_EXPONENT
from .results import Record, values
from .runs import RUNS
from .tables import ROWS, Cell

__all__ = ['difference_points', 'printed_ce']


def printed_ce(cell: Cell) -> float | None:
    """The cross-entropy that a printed loss stands for; ``None`` for what is no loss."""
    if cell.metric == 'ce':
        return cell.paper
    if cell.metric in ('ppl', 'ppl_30_31'):
        return math.log(cell.paper) / (DEPTH_PPL_EXPONENT if cell.metric == 'ppl_30_31' else 1.0)
    return None


def difference_points(records: Sequence[Record], scale: str = 'paper') -> list[dict[str, Any]]:
    """CE less that of Dense at the same scale and seed, for every run of Tables 3, 4, 6, 7 and 8.

    Tables 10, 12 and 14 follow protocols of their own.

    Returns:
        Points by printed difference, each with ``run``, ``seeds``, ``paper_difference``, and over seeds
        the mean ``difference`` and its standard deviation ``spread``, ``None`` where there is none.
    """
    printed: dict[str, float] = {}
    for row in ROWS.values():
        if row.table in ('3', '4a', '4b', '4c', '6', '7', '8'):
            for loss in filter(None, map(printed_ce, row.cells)):
                printed.setdefault(row.run, loss)
    points = []
    for run, loss in printed.items():
        dense = f'{RUNS[run].scale}-dense'
        if dense not in printed or run == dense:
            continue
        ours, base = (values(records, name, 'ce', scale) for name in (run, dense))
        differences = [ours[seed] - base[seed] for seed in sorted(set(ours) & set(base))]
        points.append(
            {
                'run': run,
                'seeds': len(differences),
                'paper_difference': loss - printed[dense],
                'difference': statistics.fmean(differences) if differences else None,
                'spread': statistics.stdev(differences) if len(differences) > 1 else None,
            }
        )
    return sorted(points, key=lambda point: point['paper_difference'])
