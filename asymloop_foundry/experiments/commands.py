# SPDX-License-Identifier: Apache-2.0
"""The sub-commands that list, show, run, collect and print the paper's experiments."""

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..files import write_json, write_text
from . import report, results
from .launch import Launch
from .mcli import run_file
from .runs import SCALES, SEED
from .tables import ROWS, TABLES, find_runs
from .text_table import render

__all__ = ['add_parsers']

DEFAULT_RESULTS = 'docs/results/results.json'
ROW_HELP = 'a row (4a/no-global-kv-k3), a run (60m-no-global-kv-k3) or a table (4a, 4)'


def add_parsers(commands: Any) -> None:
    """Adds ``list``, ``show``, ``command``, ``run``, ``collect`` and ``table``."""
    parser = commands.add_parser('list', help='every row of the tables and the run behind it')
    parser.add_argument('table', nargs='?', help='only this table')
    parser.set_defaults(run=run_list)

    parser = commands.add_parser('show', help='what a row is: YAML, keys, budget, printed values')
    _add_launch_arguments(parser)
    parser.set_defaults(run=run_show)

    parser = commands.add_parser('command', help='the exact command that trains a row')
    _add_launch_arguments(parser)
    parser.add_argument(
        '--mcli', type=Path, metavar='FILE', help='write a run file for MCLI instead (one run only)'
    )
    parser.set_defaults(run=run_command)

    parser = commands.add_parser(
        'run', help='train rows here, one after the other; finished ones are left alone'
    )
    _add_launch_arguments(parser)
    parser.add_argument(
        '-n', '--processes', type=int, help='ranks (default: one per GPU, or one without a GPU)'
    )
    parser.set_defaults(run=run_run)

    parser = commands.add_parser('collect', help='read finished runs into one results file')
    parser.add_argument('folders', nargs='+', type=Path, metavar='RUNS', help='run folders')
    parser.add_argument('-o', '--output', type=Path, default=Path(DEFAULT_RESULTS))
    parser.set_defaults(run=run_collect)

    parser = commands.add_parser('table', help="the paper's table with ours beside it")
    parser.add_argument('table', help=f'one of {", ".join(TABLES)}')
    parser.add_argument('--results', type=Path, default=Path(DEFAULT_RESULTS))
    parser.add_argument('--scale', choices=SCALES, default='paper')
    parser.add_argument('--markdown', action='store_true', help='for documents')
    parser.set_defaults(run=run_table)


def run_list(arguments: argparse.Namespace) -> None:
    """Prints the rows."""
    tables = list(TABLES) if arguments.table is None else report.table_names(arguments.table)
    for name in tables:
        print(f'Table {name}. {TABLES[name]}')
        rows = [row for row in ROWS.values() if row.table == name]
        lines = [[f'  {row.id}', row.label, row.run] for row in rows]
        print(render(['  row', 'system', 'run'], lines), end='\n\n')


def run_show(arguments: argparse.Namespace) -> None:
    """Prints everything about the runs behind the names given."""
    for launch in _launches(arguments):
        run = launch.run
        lines = [
            ['YAML', launch.yaml],
            ['parameters', f'{run.parameters(launch.scale):,}'],
            ['steps', f'{run.n_steps(launch.scale):,}'],
            ['seed', str(launch.seed)],
        ]
        if run.parent is not None:
            lines.append(['starts from', run.parent])
        lines += [[f'  {key}', str(value)] for key, value in launch.overrides().items()]
        for row in ROWS.values():
            if row.run == run.name:
                printed = ', '.join(f'{c.column} {c.paper:.{c.digits}f}' for c in row.cells)
                lines.append([f'paper, {row.id}', printed])
        print(render([launch.run_name, ''], lines), end='\n\n')


def run_command(arguments: argparse.Namespace) -> None:
    """Prints the commands, or writes an MCLI run file."""
    launches = _launches(arguments)
    if arguments.mcli is None:
        for launch in launches:
            print(launch.command())
        return
    if len(launches) != 1:
        names = ', '.join(launch.run_name for launch in launches)
        raise ValueError(f'--mcli writes one run, and these are {len(launches)}: {names}.')
    write_text(arguments.mcli, run_file(launches[0]))
    print(f'wrote {arguments.mcli}; start it with `mcli run -f {arguments.mcli}`')


def run_run(arguments: argparse.Namespace) -> None:
    """Trains; stops at the first run that fails."""
    launches = _launches(arguments)
    for launch in (progress := tqdm(launches, unit=' runs')):
        progress.set_description(launch.run_name)
        if launch.finished():
            tqdm.write(f'{launch.run_name}: finished before, left alone')
            continue
        if status := launch.train(arguments.processes):
            raise RuntimeError(
                f'{launch.run_name} stopped with exit status {status}; its output is in '
                f'{launch.folder}/train.log, and the same command continues from its checkpoint.'
            )


def run_collect(arguments: argparse.Namespace) -> None:
    """Writes the results file and says what went into it."""
    records = results.collect(arguments.folders)
    write_json(arguments.output, {'runs': records})
    lines = [
        [f'{r["scale"]}/{r["run"]}', str(r['seed']), 'yes' if r['finished'] else f'{r["steps"]}ba']
        for r in records
    ]
    print(render(['run', 'seed', 'finished'], lines))
    print(f'wrote {len(records)} runs to {arguments.output}')


def run_table(arguments: argparse.Namespace) -> None:
    """Prints tables; without a results file, the printed values alone."""
    records: list[results.Record] = []
    if arguments.results.is_file() or arguments.results != Path(DEFAULT_RESULTS):
        records = results.load_results(arguments.results)
    for name in report.table_names(arguments.table):
        print(report.table_text(name, records, arguments.scale, arguments.markdown))


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('names', nargs='+', metavar='ROW', help=ROW_HELP)
    parser.add_argument(
        '--scale',
        choices=SCALES,
        default='paper',
        help="the paper's size, or one for two CPU cores",
    )
    parser.add_argument(
        '--seed', type=int, nargs='+', metavar='SEED', help=f"(default: the row's, usually {SEED})"
    )
    parser.add_argument('--runs', default='./runs', metavar='FOLDER', help='where run folders go')
    parser.add_argument(
        '--data', metavar='FOLDER', help='prepared data (at tiny: with tokenizer/ and data/ in it)'
    )
    parser.add_argument(
        '--set',
        nargs='+',
        default=[],
        dest='extra',
        metavar='KEY=VALUE',
        help='further keys for train.py, which win',
    )


def _launches(arguments: argparse.Namespace) -> list[Launch]:
    return [
        Launch(run, arguments.scale, seed, arguments.runs, arguments.data, tuple(arguments.extra))
        for run, seeds in find_runs(arguments.names)
        for seed in arguments.seed or seeds
    ]
