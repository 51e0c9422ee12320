# SPDX-License-Identifier: Apache-2.0
"""Scores a trained model: ``python eval.py harness|icl|gsm8k|loss CHECKPOINT``.

CHECKPOINT is a Composer checkpoint (a .pt file) or an exported folder.
"""

import sys

from asymloop_foundry.evaluation.cli import main

if __name__ == '__main__':
    sys.exit(main())
