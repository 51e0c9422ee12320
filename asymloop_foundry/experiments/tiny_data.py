# SPDX-License-Identifier: Apache-2.0
"""Text, tokenizer and shards for runs at ``--scale tiny``."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .launch import repository_root
from .runs import TINY_SIZES

__all__ = ['add_parser', 'prepare']


def prepare(train: Sequence[str], validation: Sequence[str], out: Path) -> None:
    """Trains a small tokenizer on the training text and writes packed rows of both splits.

    A vocabulary of the usual size would drown a body of 0.2 million weights in its embedding and head.
    Rows are packed: documents cut at 128 tokens would leave most of the text unread.

    Args:
        train: files, folders or patterns of documents, as ``data_prep/convert_fineweb.py`` takes them.
        validation: the same, held out.
        out: gets ``tokenizer/`` and ``data/``; finished parts are left alone.
    """
    from ..quickstart import train_tokenizer

    size = TINY_SIZES['60m']
    tokenizer = out / 'tokenizer'
    if not (tokenizer / 'tokenizer.json').is_file():
        texts = out / 'text' / 'train.jsonl'
        texts.parent.mkdir(parents=True, exist_ok=True)
        with open(texts, 'w', encoding='utf-8') as lines:
            for text in _documents(train):
                lines.write(json.dumps({'text': text}) + '\n')
        train_tokenizer(texts, tokenizer, size.vocab_size)
    command = [sys.executable, 'data_prep/convert_fineweb.py', '--out', str(out.resolve() / 'data')]
    command += ['--train', *_absolute(train), '--val', *_absolute(validation)]
    command += ['--tokenizer', str(tokenizer.resolve()), '--seq-len', str(size.max_seq_len)]
    command += ['--row-format', 'packed']
    subprocess.run(command, cwd=repository_root(), check=True)


def add_parser(commands: Any) -> None:
    """Adds ``prepare-tiny`` to the sub-commands of ``python -m asymloop_foundry.experiments``."""
    parser = commands.add_parser(
        'prepare-tiny',
        help='tokenizer and shards for runs at --scale tiny',
        description='Trains a 4,096-entry tokenizer on the text and writes packed rows of 128 tokens.',
    )
    parser.add_argument('--train', nargs='+', required=True, metavar='PATH', help='documents')
    parser.add_argument(
        '--val', nargs='+', required=True, metavar='PATH', help='held-out documents'
    )
    parser.add_argument(
        '--out', type=Path, required=True, metavar='FOLDER', help='what `run --data` then names'
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prepares the data."""
    prepare(arguments.train, arguments.val, arguments.out)
    print(
        'next: python -m asymloop_foundry.experiments run 4a --scale tiny '
        f'--data {arguments.out.resolve()}'
    )


def _documents(paths: Sequence[str]) -> Iterator[str]:
    from ..data.sources import Block, decode_block, find_sources, read_blocks

    for block in read_blocks(find_sources(paths), 'text'):
        assert isinstance(block, Block)  # what cannot be read raises
        yield from filter(None, decode_block(block, 'text', skip_unreadable=False).texts)


def _absolute(paths: Sequence[str]) -> list[str]:
    return [path if '://' in path else str(Path(path).resolve()) for path in paths]
