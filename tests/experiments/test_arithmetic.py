# SPDX-License-Identifier: Apache-2.0
import contextlib
import io
import json

import pytest

from asymloop_foundry.experiments.__main__ import main


@pytest.fixture(scope='module')
def tables():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(['arithmetic', '--json']) == 0
    return json.loads(out.getvalue().splitlines()[-1])


def test_table_5_agrees_to_every_printed_digit(tables):
    rows = {(r['scale'], r['model']): r for r in tables['table5']}
    assert len(rows) == 8
    for (scale, _), row in rows.items():
        digits = -1 if scale == '1b' else 1
        assert round(row['ours'], digits) == row['paper']


def test_table_9_agrees_to_every_printed_digit(tables):
    assert len(tables['table9']) == 4 * 5
    for row in tables['table9']:
        digits = 2 if row['quantity'].endswith('percent') else 6
        assert round(row['ours'], digits) == row['paper'], row


def test_table_11_agrees_where_one_rule_gives_the_printed_numbers(tables):
    rows = {(r['scale'], r['model']): r for r in tables['table11']}
    odd = rows.pop(('135m', 'full-loop-wide'))
    assert len(rows) == 3
    for row in rows.values():
        assert round(row['ours'], 3) == row['paper'], row
        assert round(row['counted'], 3) == row['paper'], row
    assert odd['counted'] == odd['ours']
    assert (round(odd['ours'], 3), odd['paper']) == (2066.215, 2092.198)


def test_the_printed_tables_show_both_numbers(capsys):
    main(['arithmetic'])
    text = capsys.readouterr().out
    for number in ('95.366016', '0.292356', '2066.215', '2092.198', '491,520'):
        assert number in text
