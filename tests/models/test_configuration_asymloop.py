# SPDX-License-Identifier: Apache-2.0
import pytest
from family import FAMILY, SMALL

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig

INVALID = [
    ({'num_iterations': 0}, r'num_iterations=0.*num_iterations >= 1'),
    ({'num_iterations': -3}, r'num_iterations=-3'),
    ({'num_iterations': 1.5}, r'num_iterations=1.5'),
    ({'num_iterations': True}, r'num_iterations=True'),
    ({'n_encoder_layers': 0, 'n_decoder_layers': 0}, r'n_encoder_layers=0 and n_decoder_layers=0'),
    ({'n_encoder_layers': -1}, r'n_encoder_layers=-1'),
    ({'n_decoder_layers': 2.0}, r'n_decoder_layers=2.0'),
    ({'d_model': 100, 'n_heads': 3}, r'd_model=100 is not divisible by n_heads=3'),
    ({'d_model': 36, 'n_heads': 4}, r'odd head width 9'),
    ({'n_kv_heads': 3}, r'n_kv_heads=3 does not divide n_heads=4'),
    ({'vocab_size': 0}, r'vocab_size=0'),
    ({'d_ff': '48'}, r"d_ff='48'"),
    ({'global_kv': False, 'local_kv': False}, r'global_kv=False and local_kv=False'),
    ({'global_kv': 'yes'}, r"global_kv='yes'"),
    ({'qk_norm': 'encoder'}, r"qk_norm='encoder' must be one of none, decoder, all"),
    ({'input_injection': 'gate'}, r"input_injection='gate'"),
    ({'attn_backend': 'triton'}, r"attn_backend='triton'"),
    ({'rope_theta': 0}, r'rope_theta=0'),
    ({'norm_eps': float('nan')}, r'norm_eps=nan'),
    ({'init_std': -0.02}, r'init_std=-0.02'),
    ({'init_cutoff': 0}, r'init_cutoff=0'),
    ({'n_encoder_layers': 4, 'n_decoder_layers': 0}, r'num_iterations=3 has no effect'),
    (
        {'n_encoder_layers': 4, 'n_decoder_layers': 0, 'num_iterations': 1, 'global_kv': False},
        r'global_kv=False has no effect with n_decoder_layers=0',
    ),
    (
        {'n_encoder_layers': 4, 'n_decoder_layers': 0, 'num_iterations': 1, 'qk_norm': 'decoder'},
        r"qk_norm='decoder' has no effect",
    ),
    ({'tie_word_embeddings': True}, r'tie_word_embeddings=True'),
]


@pytest.mark.parametrize(('fields', 'message'), INVALID, ids=lambda v: str(v)[:50])
def test_invalid_values_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        AsymLoopConfig(**{**SMALL, **fields})


@pytest.mark.parametrize('name', FAMILY)
def test_a_configuration_survives_its_json(name, tmp_path):
    config = AsymLoopConfig(**{**SMALL, **FAMILY[name]})
    config.save_pretrained(tmp_path)
    assert AsymLoopConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_transformers_names_read_the_familys_fields():
    config = AsymLoopConfig(**SMALL, **FAMILY['asymloop'])
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (32, 4, 4)
    assert config.effective_depth == 2 + 3 * 2
