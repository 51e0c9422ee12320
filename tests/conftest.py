# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures that every test shares."""

import os

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
    default = Path(__file__).resolve().parents[2] / 'shared' / 'data'
    path = Path(os.environ.get('ASYMLOOP_DATA', default))
    if not path.is_dir():
        pytest.skip(f'no data at {path}: set ASYMLOOP_DATA to the folder of real documents')
    return path


@pytest.fixture(scope='session')
def t5_tokenizer_dir(data_dir: Path) -> Path:
    return data_dir / 'tokenizers' / 't5-base'
