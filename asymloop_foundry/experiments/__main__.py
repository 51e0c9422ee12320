# SPDX-License-Identifier: Apache-2.0
"""``python -m asymloop_foundry.experiments``: the paper's experiments, one command each."""

import argparse
import sys
from collections.abc import Sequence

from . import arithmetic


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='python -m asymloop_foundry.experiments', description='The experiments of the paper.'
    )
    commands = parser.add_subparsers(required=True, metavar='COMMAND')
    arithmetic.add_parser(commands)
    arguments = parser.parse_args(argv)
    arguments.run(arguments)
    return 0


if __name__ == '__main__':
    sys.exit(main())
