# SPDX-License-Identifier: Apache-2.0
"""Writes the seven task files of Foundry's gauntlet from the hub's rows.

    python data_prep/convert_icl.py --out data/icl                      # downloads
    python data_prep/convert_icl.py --out data/icl --data HUB_LAYOUT    # local parquet

The files go with yamls/eval/icl_tasks.yaml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asymloop_foundry.data.icl import ICL_TASKS, write_tasks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [task.name for task in ICL_TASKS]
    parser.add_argument('--out', required=True, help='folder for the files')
    parser.add_argument('--data', help="parquet in the hub's layout, instead of a download")
    parser.add_argument('--tasks', nargs='+', choices=names, default=names, help='default: all')
    args = parser.parse_args(argv)
    try:
        counts = write_tasks(
            args.out, args.data, [task for task in ICL_TASKS if task.name in args.tasks]
        )
    except (ValueError, FileNotFoundError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    for name, rows in counts.items():
        print(f'{args.out}/{name}.jsonl: {rows:,} rows')
    return 0


if __name__ == '__main__':
    sys.exit(main())
