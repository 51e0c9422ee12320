# SPDX-License-Identifier: Apache-2.0
"""Encode GSM8K into MDS shards for supervised fine-tuning.

    python data_prep/convert_gsm8k.py --out data/gsm8k-t5
    python data_prep/convert_gsm8k.py --out data/gsm8k-t5 --source FOLDER_WITH_TRAIN_JSONL

Of the 7,473 training rows 500 are held out as `dev`: the indices in gsm8k_dev_indices.json, the last 500
of numpy's RandomState(6198).permutation(7473). Interrupted, the same command starts again; finished, it
does nothing.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from streaming import MDSWriter
from tqdm import tqdm

from asymloop_foundry.data.checks import check_tokenizer
from asymloop_foundry.data.encoding import fingerprint, load_tokenizer
from asymloop_foundry.data.gsm8k import (
    HUB_NAME,
    HUB_REVISION,
    Conversion,
    Gsm8kEncoder,
    Row,
    read_questions,
    split_rows,
)
from asymloop_foundry.files import write_json

DEV_INDICES = Path(__file__).with_name('gsm8k_dev_indices.json')
COLUMNS = {'input_ids': 'ndarray:int32', 'labels': 'ndarray:int32'}
MANIFEST = 'manifest.json'


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument('--out', type=Path, required=True, help='folder for the splits')
    parse.add_argument(
        '--source', type=Path, help=f'folder with train.jsonl (default: {HUB_NAME} of the hub)'
    )
    parse.add_argument('--tokenizer', default='google-t5/t5-base', help='hub name or folder')
    parse.add_argument('--pad-token', help='for tokenizers without one')
    parse.add_argument('--max-seq-len', type=int, default=1024, help='longer rows are left out')
    return parse


def convert(
    rows: Sequence[Row], out: Path, tokenizer: str, max_seq_len: int, pad_token: str | None = None
) -> dict[str, Conversion]:
    """Writes the splits `train` and `dev` below `out`, whole or not at all.

    Returns:
        What became of the rows, by split; empty where the same conversion was there already.

    Raises:
        ValueError: the tokenizer does not serve, `out` holds another conversion, or no row is left.
    """
    loaded = load_tokenizer(tokenizer, pad_token)
    check_tokenizer(loaded)
    request = {
        'kind': 'gsm8k',
        'tokenizer_fingerprint': fingerprint(loaded),
        'max_seq_len': max_seq_len,
    }
    if (out / MANIFEST).is_file():
        found = json.loads((out / MANIFEST).read_text(encoding='utf-8')).get('request')
        if found == request:
            return {}
        raise ValueError(
            f'{out} holds another conversion ({found}) than the one asked for ({request}); remove it, '
            'or give another --out.'
        )
    encoder = Gsm8kEncoder(loaded)
    train, dev = split_rows(rows, json.loads(DEV_INDICES.read_text(encoding='utf-8')))
    reports = {}
    for split, of_split in (('train', train), ('dev', dev)):
        report = reports[split] = Conversion()
        partial = out / f'.{split}.partial'
        shutil.rmtree(partial, ignore_errors=True)
        with MDSWriter(out=str(partial), columns=COLUMNS, hashes=['sha1']) as writer:
            progress = tqdm(of_split, desc=split, unit=' rows')
            for row in encoder.rows(progress, max_seq_len, report):
                writer.write(row)
        if not report.written:
            raise ValueError(
                f'no row of {split} fits --max-seq-len={max_seq_len}; give a longer one.'
            )
        shutil.rmtree(out / split, ignore_errors=True)
        os.replace(partial, out / split)
    manifest = {
        'request': request,
        'tokenizer': tokenizer,
        'splits': {split: report.as_dict() for split, report in reports.items()},
    }
    write_json(out / MANIFEST, manifest)
    return reports


def hub_rows() -> list[Row]:
    """The training rows of the hub's data set, at a fixed revision."""
    from datasets import load_dataset

    return list(load_dataset(HUB_NAME, 'main', split='train', revision=HUB_REVISION))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    args = parser().parse_args(argv)
    try:
        rows = read_questions(args.source / 'train.jsonl') if args.source else hub_rows()
        reports = convert(rows, args.out, args.tokenizer, args.max_seq_len, args.pad_token)
    except (FileNotFoundError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    for split, report in reports.items():
        print(
            f'{args.out / split}: {report.written:,} of {report.rows:,} rows, the longest of '
            f'{report.longest} tokens; left out: {report.too_long} too long, {report.unknown} with text '
            f'the vocabulary lacks; {report.respelled} with characters written otherwise'
        )
    if not reports:
        print(f'{args.out} is complete')
    return 0


if __name__ == '__main__':
    sys.exit(main())
