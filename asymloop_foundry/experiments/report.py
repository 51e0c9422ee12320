# SPDX-License-Identifier: Apache-2.0
"""The paper's tables with our results beside them."""

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

from .differences import printed_ce
from .paper import DEPTH_PPL_EXPONENT
from .results import Record, values
from .runs import RUNS
from .tables import ROWS, TABLES, Cell, Row
from .text_table import render

__all__ = ['table_names', 'table_text']

MISSING = 'missing'


def table_names(name: str) -> list[str]:
    """The tables that a number means: ``4`` is 4a, 4b and 4c.

    Raises:
        ValueError: no result table has that number.
    """
    names = [t for t in TABLES if t == name or (t != name and t.rstrip('abc') == name)]
    if not names:
        raise ValueError(f'table {name!r}: the result tables are {", ".join(TABLES)}.')
    return names


def table_text(
    name: str, records: Sequence[Record], scale: str = 'paper', markdown: bool = False
) -> str:
    """A table of the paper: printed, ours, the difference, and what is missing.

    Losses are also given relative to the first row of the same scale, as differences of CE: at ``tiny`` only those
    can be compared with the paper, and the last line counts the pairs of rows that come in its order.

    Args:
        name: a key of :data:`.tables.TABLES`.
        records: collected results.
        scale: ``paper``, or ``tiny`` for the runs of the CPU-sized analogue.
        markdown: draw a Markdown table.
    """
    rows = [row for row in ROWS.values() if row.table == name]
    metrics = {cell.metric for row in rows for cell in row.cells}
    title = f'Table {name}. {TABLES[name]}' + (
        '. Ours: the CPU-sized analogue' if scale == 'tiny' else ''
    )
    parts = [f'**{title}**\n' if markdown else title]
    if any(metric.startswith('acc/') for metric in metrics):
        parts.append(_wide(rows, records, scale, markdown))
    else:
        parts.append(_long(rows, records, scale, markdown))
        order = _order(rows, records, scale)
        if order:
            parts.append(order)
    if name == '3':
        parts.append(_about_table_3(markdown))
    missing = _missing(rows, records, scale)
    if missing:
        parts.append(f'Missing runs: {", ".join(missing)}.')
    return '\n'.join(parts) + '\n'


def _long(rows: Sequence[Row], records: Sequence[Record], scale: str, markdown: bool) -> str:
    """One line for each printed number."""
    with_seeds = any(len(row.seeds) > 1 for row in rows) or _most_seeds(rows, records, scale) > 1
    headers = ['row', 'quantity', 'paper', 'ours']
    absolute = (
        scale == 'paper'
    )  # the loss of another size and text has no difference worth printing
    if absolute:
        headers.append('ours - paper')
    relative = any(_is_loss(cell) for row in rows for cell in row.cells)
    if relative:
        headers += ['dCE paper', 'dCE ours']
    if with_seeds:
        headers.append('seeds')
    first: dict[tuple[str, str], tuple[Row, Cell]] = {}
    for row in rows:
        for cell in _shown(row.cells):
            first.setdefault((RUNS[row.run].scale, cell.metric), (row, cell))
    lines = []
    for row in rows:
        for cell in _shown(row.cells):
            ours = values(records, row.run, _read_metric(cell), scale)
            mean = _on_printed_scale(statistics.fmean(ours.values()), cell) if ours else None
            line = [
                row.label,
                _column(cell),
                _number(cell.paper, cell.digits, cell.spread),
                MISSING if mean is None else _number(mean, cell.digits, _spread(ours, cell)),
            ]
            if absolute:
                line.append('' if mean is None else f'{mean - cell.paper:+.{cell.digits}f}')
            if relative:
                of_scale = first[RUNS[row.run].scale, cell.metric]
                line += _relative(cell, ours, of_scale, records, scale)
            if with_seeds:
                line.append(str(len(ours)))
            lines.append(line)
    return render(headers, lines, markdown)


def _wide(rows: Sequence[Row], records: Sequence[Record], scale: str, markdown: bool) -> str:
    """One line for paper, ours and difference of each row, a column for each task."""
    parts = []
    for shots in (0, 5):
        cells = [[c for c in row.cells if c.metric.endswith(f'/{shots}')] for row in rows]
        headers = [f'{shots}-shot', ''] + [c.metric.split('/')[1] for c in cells[0]]
        lines = []
        for row, of_row in zip(rows, cells, strict=True):
            means = []
            for cell in of_row:
                ours = values(records, row.run, cell.metric, scale)
                means.append(statistics.fmean(ours.values()) if ours else None)
            lines.append([row.label, 'paper'] + [f'{c.paper:.2f}' for c in of_row])
            lines.append(
                [row.label, 'ours'] + [MISSING if m is None else f'{m:.2f}' for m in means]
            )
            if any(m is not None for m in means):
                lines.append(
                    [row.label, 'ours - paper']
                    + [
                        '' if m is None else f'{m - c.paper:+.2f}'
                        for m, c in zip(means, of_row, strict=True)
                    ]
                )
        parts.append(render(headers, lines, markdown))
    return '\n\n'.join(parts)


def _shown(cells: Sequence[Cell]) -> list[Cell]:
    """Table 3's number comes twice: on the table's scale, and as the CE that it stands for."""
    shown = list(cells)
    for cell in cells:
        if cell.metric == 'ppl_30_31':
            true_ce = printed_ce(cell)
            assert true_ce is not None
            shown.append(Cell('PPL', 'ppl', math.exp(true_ce), cell.digits))
    return shown


def _column(cell: Cell) -> str:
    return 'PPL, exp(30/31 CE)' if cell.metric == 'ppl_30_31' else cell.column


def _is_loss(cell: Cell) -> bool:
    return printed_ce(cell) is not None


def _read_metric(cell: Cell) -> str:
    """Losses are averaged over seeds as CE, whatever is printed."""
    return 'ce' if _is_loss(cell) else cell.metric


def _on_printed_scale(value: float, cell: Cell) -> float:
    if cell.metric == 'ppl':
        return math.exp(value)
    if cell.metric == 'ppl_30_31':
        return math.exp(DEPTH_PPL_EXPONENT * value)
    return value


def _relative(
    cell: Cell,
    ours: dict[int, float],
    first: tuple[Row, Cell],
    records: Sequence[Record],
    scale: str,
) -> list[str]:
    """CE less the first row's, printed and ours; of seeds that both rows have."""
    if not _is_loss(cell):
        return ['', '']
    first_row, first_cell = first
    printed, first_printed = printed_ce(cell), printed_ce(first_cell)
    assert printed is not None
    assert first_printed is not None
    theirs = values(records, first_row.run, 'ce', scale)
    both = sorted(set(ours) & set(theirs))
    mine = statistics.fmean(ours[s] - theirs[s] for s in both) if both else None
    return [f'{printed - first_printed:+.4f}', MISSING if mine is None else f'{mine:+.4f}']


def _order(rows: Sequence[Row], records: Sequence[Record], scale: str) -> str:
    """How many pairs of rows, of those with results, come in the paper's order of CE."""
    points = {}
    for row in rows:
        losses = list(filter(None, map(printed_ce, row.cells)))
        ours = values(records, row.run, 'ce', scale)
        if losses and ours:
            points[row.id] = (losses[0], statistics.fmean(ours.values()), RUNS[row.run].scale)
    pairs = [(a, b) for a, b in combinations(points.values(), 2) if a[0] != b[0] and a[2] == b[2]]
    if not pairs:
        return ''
    agreeing = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    return f"Of {len(pairs)} pairs of rows of one scale with results, {agreeing} come in the paper's order."


def _about_table_3(markdown: bool) -> str:
    text = (
        "Table 3's printed PPL is exp(30/31 CE) of the same runs' CE in Tables 4 and 8 wherever both are "
        'printed; the second line of each row gives the PPL that it stands for, and dCE is on that scale.'
    )
    return f'\n{text}' if markdown else text


def _missing(rows: Sequence[Row], records: Sequence[Record], scale: str) -> list[str]:
    missing = []
    for row in rows:
        lacking = [c for c in row.cells if not values(records, row.run, _read_metric(c), scale)]
        if len(lacking) == len(row.cells):
            missing.append(row.run)
        elif lacking:
            missing.append(f'{row.run} ({", ".join(c.column for c in lacking)})')
    return list(dict.fromkeys(missing))


def _most_seeds(rows: Sequence[Row], records: Sequence[Record], scale: str) -> int:
    counts = [len(values(records, row.run, _read_metric(row.cells[0]), scale)) for row in rows]
    return max(counts, default=0)


def _spread(ours: dict[int, float], cell: Cell) -> float | None:
    """Standard deviation over seeds, of the quantity as printed."""
    if len(ours) < 2:
        return None
    return statistics.stdev(_on_printed_scale(value, cell) for value in ours.values())


def _number(value: float, digits: int, spread: float | None) -> str:
    return f'{value:.{digits}f}' + ('' if spread is None else f' ± {spread:.{digits}f}')
