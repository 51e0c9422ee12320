# SPDX-License-Identifier: Apache-2.0
"""``python -m asymloop_foundry.experiments``: the paper's experiments, one command each."""

import argparse
import sys
from collections.abc import Sequence

from . import arithmetic, commands, result_figures, tiny_data


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='python -m asymloop_foundry.experiments', description='The experiments of the paper.'
    )
    subparsers = parser.add_subparsers(required=True, metavar='COMMAND')
    commands.add_parsers(subparsers)
    tiny_data.add_parser(subparsers)
    result_figures.add_parser(subparsers)
    arithmetic.add_parser(subparsers)
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ('figures', '-h', '--help'):
        from . import figures  # loads Composer, which takes seconds

        figures.add_parser(subparsers)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
