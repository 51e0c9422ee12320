# SPDX-License-Identifier: Apache-2.0
r"""Tokenize FineWeb-Edu, or any text, into MDS shards for pretraining.

Without sources it makes the paper's data: shards 0 to 39 of FineWeb-Edu-dedup for training and the
first ten million tokens of shard 233 for validation, t5-base, one document a row of 1024 tokens.

    python data_prep/convert_fineweb.py --out data/fineweb
    python data_prep/convert_fineweb.py --out data/mine --train texts/*.jsonl.gz --val held_out.txt \
        --row-format packed --tokenizer HuggingFaceTB/SmolLM-135M --pad-token '<empty_output>'

Interrupted, the same command goes on where it stopped. Finished, it does nothing.
"""

import sys

# Worker processes import this file again, and have no use for what the command line needs.
if __name__ == '__main__':
    from asymloop_foundry.data.command import main

    sys.exit(main(description=__doc__))
