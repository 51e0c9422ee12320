# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.flops import (
    active_parameter_count,
    forward_breakdown,
    forward_flops,
    kv_cache_bytes,
    parameter_count,
    training_flops,
)
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

SMALL = {'vocab_size': 96, 'd_model': 32, 'n_heads': 2, 'd_ff': 40, 'max_seq_len': 16}
FAMILY = {
    'dense': {'n_encoder_layers': 3, 'n_decoder_layers': 0, 'num_iterations': 1},
    'full_loop': {'n_encoder_layers': 0, 'n_decoder_layers': 2, 'global_kv': False},
    'asymloop': {'n_encoder_layers': 2, 'n_decoder_layers': 1, 'qk_norm': 'decoder'},
    'normalised': {'n_encoder_layers': 1, 'n_decoder_layers': 2, 'qk_norm': 'all'},
    'no_global_kv': {'n_encoder_layers': 1, 'n_decoder_layers': 1, 'global_kv': False},
    'no_local_kv': {
        'n_encoder_layers': 1,
        'n_decoder_layers': 2,
        'local_kv': False,
        'qk_norm': 'decoder',
    },
    'additive': {'n_encoder_layers': 1, 'n_decoder_layers': 1, 'input_injection': 'additive'},
    'grouped_queries': {'n_encoder_layers': 1, 'n_decoder_layers': 1, 'n_kv_heads': 1},
}


def config_named(name: str, **changes) -> AsymLoopConfig:
    return AsymLoopConfig(**{**SMALL, **FAMILY[name], **changes})


@pytest.mark.parametrize('name', FAMILY)
def test_parameter_count_is_the_models(name):
    config = config_named(name)
    with torch.device('meta'):
        model = AsymLoopForCausalLM(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    assert active_parameter_count(config) == parameter_count(config)


@pytest.mark.parametrize(('scale', 'sizes', 'dense', 'asymloop'), [
    ('60M', (768, 2048, 6, 6), 91_825_920, 95_366_016),
    ('135M', (768, 2048, 12, 12), 134_302_464, 141_381_504),
    ('350M', (1024, 2736, 16, 24), 368_231_424, 393_399_552),
    ('1B', (2048, 5461, 32, 24), 1_339_607_040, 1_440_272_640),
])  # fmt: skip
def test_parameter_counts_of_table_5(scale, sizes, dense, asymloop):
    d, m, heads, layers = sizes
    fields = {'d_model': d, 'd_ff': m, 'n_heads': heads}
    as_dense = AsymLoopConfig(
        **fields, n_encoder_layers=layers, n_decoder_layers=0, num_iterations=1
    )
    as_asymloop = AsymLoopConfig(
        **fields, n_encoder_layers=layers // 2, n_decoder_layers=layers // 2, qk_norm='decoder'
    )
    assert parameter_count(as_dense) == dense
    assert parameter_count(as_asymloop) == asymloop


@pytest.mark.parametrize('name', FAMILY)
def test_forward_flops_are_what_torch_counts_with_explicit_attention(name):
    config = config_named(name, attn_backend='reference')
    model = AsymLoopForCausalLM(config).eval()
    ids = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert forward_flops(config, 2, 16) == counter.get_total_flops()


@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('name', [*FAMILY, 'experts'])
def test_training_flops_are_what_torch_counts_with_and_without_checkpointing(name, recompute):
    experts = {'n_encoder_layers': 1, 'n_decoder_layers': 1, 'n_experts': 4, 'expert_top_k': 2}
    fields = experts if name == 'experts' else FAMILY[name]
    config = AsymLoopConfig(**{**SMALL, **fields, 'activation_checkpointing': recompute})
    model = AsymLoopForCausalLM(config).train()
    ids = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert training_flops(config, 2, 16, recompute=recompute) == counter.get_total_flops()


def test_experts_count_once_in_all_and_top_k_times_per_token():
    config = AsymLoopConfig(
        **SMALL, n_encoder_layers=1, n_decoder_layers=1, n_experts=8, expert_top_k=2
    )
    with torch.device('meta'):
        model = AsymLoopForCausalLM(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    idle = 2 * (8 - 2) * 3 * 32 * 40
    assert active_parameter_count(config) == parameter_count(config) - idle
    once = forward_breakdown(config, 1, 1, num_iterations=1)
    assert once.down_products == 2 * 2 * 2 * 32 * 40


def test_each_further_iteration_costs_the_decoder_alone():
    config = config_named('asymloop')
    one, two, three = (forward_breakdown(config, 1, 16, num_iterations=k) for k in (1, 2, 3))
    assert three.total - two.total == two.total - one.total
    assert three.global_projections == one.global_projections
    assert three.global_attention == 3 * one.global_attention


def test_causal_attention_counts_the_visible_pairs():
    config = config_named('asymloop')
    full, causal = (forward_breakdown(config, 3, 16, causal=c) for c in (False, True))
    assert causal.attention * 16**2 == full.attention * (16 * 17 // 2)
    assert causal.layer_products == full.layer_products


def test_training_costs_three_forward_passes_and_half_an_attention_more():
    config = config_named('asymloop')
    forward = forward_breakdown(config, 2, 16)
    assert training_flops(config, 2, 16) == 3 * forward.total + forward.attention // 2


def test_recomputation_repeats_each_layer_call_up_to_its_last_product():
    config = config_named('full_loop', num_iterations=2)
    forward = forward_breakdown(config, 2, 16)
    extra = training_flops(config, 2, 16, recompute=True) - training_flops(config, 2, 16)
    assert extra == forward.total - forward.head - 2 * 32 * 4 * 32 * 40


def test_cache_holds_one_global_slot_and_k_local_slots_per_decoder_layer():
    config = AsymLoopConfig(d_model=768, n_heads=6, n_encoder_layers=3, n_decoder_layers=3)
    assert kv_cache_bytes(config) == 45 * 1024
    assert kv_cache_bytes(config, num_iterations=1, bytes_per_element=4) == 54 * 1024
    assert kv_cache_bytes(config_named('no_local_kv')) == 2 * (1 + 2) * 32 * 2
    assert kv_cache_bytes(config_named('grouped_queries')) == 2 * (1 + 1 + 3) * 16 * 2


def test_iterations_without_a_decoder_are_refused():
    with pytest.raises(ValueError, match='num_iterations=3'):
        forward_flops(config_named('dense'), 1, 16, num_iterations=3)
