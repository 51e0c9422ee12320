# SPDX-License-Identifier: Apache-2.0
"""Trains from a Foundry YAML: ``composer train.py yamls/asymloop-350m.yaml [key=value ...]``."""

import sys

from llmfoundry.command_utils import train_from_yaml

if __name__ == '__main__':
    if len(sys.argv) < 2 or sys.argv[1] in ('-h', '--help'):
        sys.exit('usage: composer train.py YAML [key=value ...]')
    train_from_yaml(sys.argv[1], sys.argv[2:])
