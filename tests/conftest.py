# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures that every test shares."""

import json
import os
import subprocess
import sys

# Before any import that reads them: no network, one thread a process (two OpenMP threads on two
# busy cores are an order of magnitude slower than one).
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('HF_DATASETS_OFFLINE', '1')
os.environ.setdefault('WANDB_MODE', 'disabled')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason='needs a CUDA device')
    for item in items:
        if 'gpu' in item.keywords:
            item.add_marker(no_gpu)


@pytest.fixture(scope='session')
def data_dir() -> Path:
    """The folder of real documents, tokenizers and tasks named by ASYMLOOP_DATA."""
    default = ROOT.parent / 'shared' / 'data'
    path = Path(os.environ.get('ASYMLOOP_DATA', default))
    if not path.is_dir():
        pytest.skip(f'no data at {path}: set ASYMLOOP_DATA to the folder of real documents')
    return path


@pytest.fixture(scope='session')
def t5_tokenizer_dir(data_dir: Path) -> Path:
    return data_dir / 'tokenizers' / 't5-base'


@pytest.fixture(scope='session')
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as the quickstart makes it, from the language reference alone.

    ``tokenizer`` (1,024 entries), ``data`` (packed rows of 32 tokens) and ``padded`` (one document a row
    of 32), each with a train and a val split.
    """
    from pydoc_data.topics import topics

    from asymloop_foundry.quickstart import train_tokenizer

    folder = tmp_path_factory.mktemp('text_run')
    texts = sorted(topics.items())
    for split, rows in (('train', texts[::2]), ('val', texts[1:40:2])):
        lines = [json.dumps({'id': name, 'text': text}) for name, text in rows]
        (folder / f'{split}.jsonl').write_text('\n'.join(lines) + '\n')
    train_tokenizer(folder / 'train.jsonl', folder / 'tokenizer', 1024)
    for row_format, name in (('packed', 'data'), ('padded', 'padded')):
        convert = [sys.executable, ROOT / 'data_prep' / 'convert_fineweb.py', '--seq-len', '32']
        convert += ['--out', folder / name, '--tokenizer', folder / 'tokenizer']
        convert += ['--train', folder / 'train.jsonl', '--val', folder / 'val.jsonl']
        subprocess.run([*convert, '--row-format', row_format], check=True, capture_output=True)
    return folder
