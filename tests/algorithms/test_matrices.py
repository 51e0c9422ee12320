# SPDX-License-Identifier: Apache-2.0
import warnings
from collections import Counter

import pytest
import torch
from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM

from asymloop_foundry.algorithms.matrices import group_mean, roles_of
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM


def counts(model):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        return Counter((role.stack, role.kind) for role in roles_of(model).values())


def asymloop(**fields):
    sizes = {'vocab_size': 32, 'd_model': 16, 'n_heads': 2, 'd_ff': 24, 'max_seq_len': 8}
    return AsymLoopForCausalLM(AsymLoopConfig(**sizes, **fields))


def mpt(fused):
    config = MPTConfig(
        d_model=16,
        n_heads=2,
        n_layers=2,
        max_seq_len=8,
        vocab_size=32,
        no_bias=True,
        attn_config={'attn_impl': 'torch', 'fused_qkv': fused},
        loss_fn='torch_crossentropy',
    )
    return MPTForCausalLM(config)


def test_asymloop_has_every_role():
    found = counts(asymloop(n_encoder_layers=2, n_decoder_layers=3, qk_norm='decoder'))
    for stack, layers in (('encoder', 2), ('decoder', 3)):
        assert found[stack, 'attention'] == 4 * layers
        assert found[stack, 'ffn'] == 3 * layers
    assert found['decoder', 'global'] == 2 * 3
    assert found['layers', 'embedding'] == found['layers', 'head'] == 1


@pytest.mark.parametrize(
    ('encoder', 'decoder', 'iterations', 'stack'), [(4, 0, 1, 'encoder'), (0, 4, 2, 'decoder')]
)
def test_dense_and_full_loop_need_nothing_special(encoder, decoder, iterations, stack):
    model = asymloop(
        n_encoder_layers=encoder,
        n_decoder_layers=decoder,
        num_iterations=iterations,
        **({'global_kv': False} if decoder else {}),
    )
    found = counts(model)
    assert (found[stack, 'attention'], found[stack, 'ffn']) == (16, 12)


def test_hugging_face_llama():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    found = counts(LlamaForCausalLM(config))
    assert (found['layers', 'attention'], found['layers', 'ffn']) == (8, 6)
    assert found['layers', 'embedding'] == found['layers', 'head'] == 1


def test_mpt_with_projections_of_their_own():
    found = counts(mpt(fused=False))
    assert (found['layers', 'attention'], found['layers', 'ffn']) == (8, 4)


def test_fused_projections_count_as_one_matrix_and_are_reported():
    with pytest.warns(UserWarning, match=r'Wqkv.*fused_qkv: false'):
        roles = roles_of(mpt(fused=True))
    assert sum(role.kind == 'attention' for role in roles.values()) == 4


def test_a_linear_weight_of_unknown_name_is_reported_and_a_router_is_not():
    model = torch.nn.ModuleDict(
        {'adapter': torch.nn.Linear(4, 4, bias=False), 'router': torch.nn.Linear(4, 2, bias=False)}
    )
    with pytest.warns(UserWarning, match=r'1 linear weights have no known role.*adapter\.weight'):
        roles = roles_of(model)
    assert {role.kind for role in roles.values()} == {'other'}


def test_frozen_parameters_have_no_role():
    model = asymloop(n_encoder_layers=1, n_decoder_layers=1)
    model.lm_head.weight.requires_grad_(False)
    assert 'lm_head.weight' not in roles_of(model)


def test_a_group_mean_counts_every_matrix_once_and_leaves_out_the_rest():
    roles = roles_of(asymloop(n_encoder_layers=1, n_decoder_layers=1))
    values = {name: float(index) for index, name in enumerate(roles)}
    means = group_mean(values, roles)
    gates = [
        value for name, value in values.items() if '.encoder.0.ffn.' in name and 'proj' in name
    ]
    assert means['encoder/ffn'] == sum(gates) / 3
    assert set(means) == {
        'decoder/attention',
        'decoder/ffn',
        'decoder/global',
        'encoder/attention',
        'encoder/ffn',
    }
