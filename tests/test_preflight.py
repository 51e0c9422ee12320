# SPDX-License-Identifier: Apache-2.0
"""Bad training configurations: each is refused before anything is built, by key, value and remedy."""

import json
import shutil

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from streaming import MDSWriter
from tiny_runs import ROOT, TINY, overrides
from transformers import AutoTokenizer

from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM
from asymloop_foundry.preflight import preflight


@pytest.fixture
def configuration(text_run, tmp_path):
    """Builds the tiny configuration with changes, as Foundry hands it to config transforms."""

    def make(**changes):
        base = OmegaConf.load(TINY)
        dots = OmegaConf.from_dotlist(overrides(text_run, tmp_path, **changes))
        return OmegaConf.to_container(OmegaConf.merge(base, dots), resolve=True)

    return make


def test_the_tiny_configuration_passes_unchanged(configuration):
    cfg = configuration()
    assert preflight(json.loads(json.dumps(cfg))) == cfg


def test_configurations_of_other_models_pass_unread():
    cfg = {'model': {'name': 'mpt_causal_lm'}, 'precision': 'amp_bf16'}
    assert preflight(cfg) is cfg


@pytest.mark.parametrize(
    'key', ['max_seq_len', 'max_duration', 'global_train_batch_size', 'tokenizer', 'train_loader']
)
def test_a_missing_key_is_named(configuration, key):
    cfg = configuration()
    del cfg[key]
    with pytest.raises(ValueError, match=f'{key} is missing'):
        preflight(cfg)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'train_loader.dataset.local': '/nowhere/at/all'},
            r'train_loader.dataset.*/nowhere/at/all',
        ),
        ({'train_loader.dataset.cache_limit': '10mb'}, r'cache_limit'),
        ({'train_loader.dataset.split': 'val'}, r'eval_loader\.dataset\.local'),
    ],
    ids=lambda v: '-'.join(v) if isinstance(v, dict) else '',
)
def test_a_bad_value_is_refused_by_name(configuration, changes, message):
    with pytest.raises(ValueError, match=message):
        preflight(configuration(**changes))


def test_an_index_that_is_missing_is_named(configuration, text_run, tmp_path):
    local = tmp_path / 'copy'
    shutil.copytree(text_run / 'data', local)
    (local / 'train' / 'index.json').unlink()
    with pytest.raises(ValueError, match=r'train_loader\.dataset.*index\.json'):
        preflight(configuration(**{'train_loader.dataset.local': local}))


def test_data_of_another_sequence_length_is_refused(configuration):
    with pytest.raises(ValueError, match=r'train_loader\.dataset.*32.*64'):
        preflight(configuration(max_seq_len=64))


def test_data_of_another_tokenizer_is_refused(configuration, text_run, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(text_run / 'tokenizer')
    tokenizer.add_tokens(['another'])
    tokenizer.save_pretrained(tmp_path / 'other')
    with pytest.raises(ValueError, match=r'train_loader\.dataset.*tokenizer'):
        preflight(configuration(**{'tokenizer.name': tmp_path / 'other'}))


@pytest.mark.parametrize('written', ['uint16', 'uint32', 'int32'])
def test_bytes_of_one_integer_type_are_not_read_as_another(configuration, tmp_path, written):
    for split in ('train', 'val'):
        with MDSWriter(out=str(tmp_path / 'bytes' / split), columns={'tokens': 'bytes'}) as out:
            for row in range(4):
                out.write({'tokens': np.full(32, 300 + row, dtype=written).tobytes()})
    with pytest.raises(ValueError, match=r'token_encoding_type'):
        preflight(configuration(**{'train_loader.dataset.local': tmp_path / 'bytes'}))


@pytest.mark.parametrize(
    ('special', 'message'),
    [
        ({'eos_token': None}, r'has no EOS token'),
        ({'pad_token': None}, r'has no pad token'),
        ({'pad_token': '</s>'}, r'pads with its EOS token'),
    ],
    ids=['no-eos', 'no-pad', 'pad-is-eos'],
)
def test_a_tokenizer_without_its_own_eos_and_pad_is_refused(
    configuration, text_run, tmp_path, special, message
):
    tokenizer = AutoTokenizer.from_pretrained(text_run / 'tokenizer')
    for key, value in special.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(tmp_path / 'tokenizer')
    with pytest.raises(ValueError, match=message):
        preflight(configuration(**{'tokenizer.name': tmp_path / 'tokenizer'}))


def test_an_unknown_model_key_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r'model\.num_iteration=3.*did you mean num_iterations'):
        ComposerAsymLoopCausalLM(num_iteration=3)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(text_run):
    tokenizer = AutoTokenizer.from_pretrained(text_run / 'tokenizer')
    with pytest.raises(ValueError, match=r'model\.vocab_size=1000.*1024 tokens.*at least'):
        ComposerAsymLoopCausalLM(tokenizer=tokenizer, vocab_size=1000)


def test_t5s_own_vocabulary_numbers_are_refused(t5_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(t5_tokenizer_dir)
    with pytest.raises(ValueError, match=r'model\.vocab_size=32000.*32100 tokens'):
        ComposerAsymLoopCausalLM(tokenizer=tokenizer, vocab_size=32000)


@pytest.mark.parametrize('path', sorted((ROOT / 'yamls').glob('*.yaml')), ids=lambda p: p.stem)
def test_every_training_yaml_has_valid_model_keys_and_the_papers_optimizer(path):
    cfg = yaml.safe_load(path.read_text())
    assert cfg['optimizer']['name'] == 'adamw'
    assert cfg['optimizer']['betas'] == [0.9, 0.95]
    assert cfg['optimizer']['weight_decay'] == 0.1
    assert cfg['seed'] == 6198
    assert cfg['scheduler'] == {'name': 'cosine_with_warmup', 't_warmup': '0.1dur', 'alpha_f': 0.1}
    assert cfg['algorithms']['gradient_clipping']['clipping_threshold'] == 1.0
    if 'tiny' not in path.stem:
        assert cfg['global_train_batch_size'] == 512
        assert cfg['max_duration'].endswith('ba')
