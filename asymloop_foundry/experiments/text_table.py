# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal and for Markdown."""

import re
from collections.abc import Sequence

__all__ = ['render']


def render(headers: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Aligns the columns of a table: the first to the left, numbers to the right.

    Args:
        headers: one title per column.
        rows: cells, as many as there are headers.
        markdown: draw a Markdown table instead of plain columns.

    Raises:
        ValueError: a row has more or fewer cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f'row {list(row)} has {len(row)} cells for {len(headers)} headers.')
    widths = [max(len(str(cell)) for cell in column) for column in zip(headers, *rows, strict=True)]
    right = [i > 0 and all(_is_number(row[i]) for row in rows) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return '| ' + ' | '.join(padded) + ' |' if markdown else '  '.join(padded).rstrip()

    if markdown:
        rule = '|' + '|'.join(
            '-' * (width + 1) + (':' if to_right else '-')
            for width, to_right in zip(widths, right, strict=True)
        )
        rule += '|'
    else:
        rule = '  '.join('-' * width for width in widths)
    return '\n'.join([line(headers), rule, *(line(row) for row in rows)])


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(r'[-+]?[\d,.]+( ± [\d.]+)?|missing|', cell))
