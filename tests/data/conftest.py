# SPDX-License-Identifier: Apache-2.0
"""Tokenizers to prepare data with."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from data.preparing import make_texts
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


@pytest.fixture(scope='session')
def bpe() -> PreTrainedTokenizerBase:
    """A byte-level BPE of 400 entries with an EOS and a pad of their own."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator(
        make_texts(100),
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=['<pad>', '<eos>', '<spare>'],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token='<eos>',
        pad_token='<pad>',
        additional_special_tokens=['<spare>'],
    )


@pytest.fixture(scope='session')
def t5(t5_tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(t5_tokenizer_dir))


@pytest.fixture
def smollm(data_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(data_dir / 'tokenizers' / 'smollm-135m'))
