# SPDX-License-Identifier: Apache-2.0
"""A tiny random model with T5's vocabulary, as the evaluations get it."""

import pytest
import torch
from transformers import AutoTokenizer

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM


@pytest.fixture(scope='session')
def t5_tokenizer(t5_tokenizer_dir):
    return AutoTokenizer.from_pretrained(t5_tokenizer_dir)


@pytest.fixture(scope='session')
def t5_model():
    torch.manual_seed(0)
    config = AsymLoopConfig(
        vocab_size=32128,
        d_model=32,
        n_heads=2,
        d_ff=48,
        n_encoder_layers=1,
        n_decoder_layers=1,
        num_iterations=2,
        qk_norm='decoder',
        init_std=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return AsymLoopForCausalLM(config).eval()
