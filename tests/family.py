# SPDX-License-Identifier: Apache-2.0
"""The members of the family at a size that tests can afford."""

from typing import Any

import torch

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

SMALL: dict[str, Any] = {
    'vocab_size': 61,
    'd_model': 32,
    'n_heads': 4,
    'd_ff': 48,
    'max_seq_len': 64,
}
HALVES: dict[str, Any] = {'n_encoder_layers': 2, 'n_decoder_layers': 2, 'num_iterations': 3}

FAMILY: dict[str, dict[str, Any]] = {
    'dense': {'n_encoder_layers': 4, 'n_decoder_layers': 0, 'num_iterations': 1},
    'dense_qk_norm': {
        'n_encoder_layers': 4,
        'n_decoder_layers': 0,
        'num_iterations': 1,
        'qk_norm': 'all',
    },
    'full_loop': {
        'n_encoder_layers': 0,
        'n_decoder_layers': 3,
        'num_iterations': 2,
        'global_kv': False,
    },
    'asymloop': {**HALVES, 'qk_norm': 'decoder'},
    'asymloop_k1': {**HALVES, 'num_iterations': 1, 'qk_norm': 'decoder'},
    'asymloop_uneven': {'n_encoder_layers': 1, 'n_decoder_layers': 3, 'num_iterations': 2},
    'no_encoder': {'n_encoder_layers': 0, 'n_decoder_layers': 2, 'num_iterations': 2},
    'no_qk_norm': {**HALVES, 'qk_norm': 'none'},
    'qk_norm_all': {**HALVES, 'qk_norm': 'all'},
    'no_global_kv': {**HALVES, 'global_kv': False, 'qk_norm': 'decoder'},
    'no_local_kv': {**HALVES, 'local_kv': False, 'qk_norm': 'decoder'},
    'parameter_matched': {**HALVES, 'global_kv': False, 'qk_norm': 'decoder', 'd_ff': 64},
    'additive_injection': {
        **HALVES,
        'global_kv': False,
        'input_injection': 'additive',
        'qk_norm': 'decoder',
    },
    'dense_moe': {
        'n_encoder_layers': 3,
        'n_decoder_layers': 0,
        'num_iterations': 1,
        'd_ff': 24,
        'n_experts': 4,
    },
    'full_loop_moe': {
        'n_encoder_layers': 0,
        'n_decoder_layers': 2,
        'num_iterations': 2,
        'global_kv': False,
        'd_ff': 24,
        'n_experts': 8,
        'expert_top_k': 3,
        'normalize_expert_weights': True,
    },
    'asymloop_moe': {**HALVES, 'qk_norm': 'decoder', 'd_ff': 24, 'n_experts': 4},
    'grouped_queries': {**HALVES, 'n_kv_heads': 2, 'qk_norm': 'decoder'},
}


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> AsymLoopForCausalLM:
    """One member with weights large enough that every part of it matters."""
    torch.manual_seed(0)
    config = AsymLoopConfig(**{**SMALL, 'init_std': 0.2, **FAMILY[name], **overrides})
    model = AsymLoopForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if 'norm' in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def token_ids(rows: int = 2, length: int = 19, vocab_size: int = 61) -> torch.Tensor:
    """Random ids, the same at every call."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
