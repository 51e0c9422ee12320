# SPDX-License-Identifier: Apache-2.0
"""Invalid configurations, one table: each gets one error that names key, value and remedy.

Each row changes the tiny configuration as a YAML or a command line could, and is then taken as far as
Foundry takes a run before its first step: config transforms, then the builders of model, optimizer,
scheduler, algorithms and callbacks.
"""

import copy
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmfoundry.utils.builders import (
    build_algorithm,
    build_callback,
    build_optimizer,
    build_scheduler,
)
from omegaconf import OmegaConf
from tiny_runs import TINY, overrides

from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.preflight import preflight
from asymloop_foundry.run_checks import check_run

REMOVED = object()


@pytest.fixture(scope='module')
def tiny(text_run, tmp_path_factory):
    """The tiny configuration as Foundry hands it to config transforms."""
    base = OmegaConf.load(TINY)
    dots = OmegaConf.from_dotlist(overrides(text_run, tmp_path_factory.mktemp('run')))
    return OmegaConf.to_container(OmegaConf.merge(base, dots), resolve=True)


def changed(cfg, changes):
    """A copy with values set, or keys removed, by dotted name."""
    cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        *parents, last = key.split('.')
        place = cfg
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    return cfg


def start(cfg):
    """What happens to a configuration before the first step."""
    cfg = preflight(cfg)
    optimizer, scheduler = dict(cfg['optimizer']), dict(cfg['scheduler'])
    model = {k: v for k, v in cfg['model'].items() if k != 'name'}
    built = ComposerAsymLoopCausalLM(**model)
    build_optimizer(built, optimizer.pop('name'), optimizer)
    build_scheduler(scheduler.pop('name'), scheduler)
    for name, keys in (cfg.get('algorithms') or {}).items():
        build_algorithm(name, keys)
    for name, keys in (cfg.get('callbacks') or {}).items():
        build_callback(name, dict(keys or {}), cfg)


def refusal(call):
    """The message of the ValueError that a call ends in; None where it succeeds."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


# Changes; the key and the value as the error must give them; what to do about it.
MODEL = [
    ({'model.num_iteration': 3}, 'model.num_iteration', '3', 'did you mean num_iterations'),
    ({'model.hidden_dim': 8}, 'model.hidden_dim', '8', 'Its keys are'),
    ({'model.num_iterations': 0}, 'num_iterations', '0', 'num_iterations >= 1'),
    ({'model.num_iterations': '3'}, 'num_iterations', "'3'", 'num_iterations >= 1'),
    ({'model.d_model': 33}, 'd_model', '33', 'n_heads that divides'),
    ({'model.d_model': 30, 'model.n_heads': 2}, 'd_model', '30', 'even width'),
    ({'model.d_model': None}, 'd_model', 'None', 'positive integer'),
    ({'model.n_heads': 0}, 'n_heads', '0', 'positive integer'),
    ({'model.n_kv_heads': 3}, 'n_kv_heads', '3', 'divides n_heads'),
    ({'model.d_ff': -1}, 'd_ff', '-1', 'positive integer'),
    ({'model.n_encoder_layers': -2}, 'n_encoder_layers', '-2', 'at least 0'),
    (
        {'model.n_encoder_layers': 0, 'model.n_decoder_layers': 0},
        'n_encoder_layers',
        '0',
        'give at least one',
    ),
    ({'model.global_kv': 'yes'}, 'global_kv', "'yes'", 'true or false'),
    ({'model.global_kv': False, 'model.local_kv': False}, 'global_kv', 'False', 'set at least one'),
    ({'model.qk_norm': 'encoder'}, 'qk_norm', "'encoder'", 'none, decoder, all'),
    ({'model.input_injection': 'gate'}, 'input_injection', "'gate'", 'none, additive'),
    ({'model.attn_backend': 'flash'}, 'attn_backend', "'flash'", 'one of auto'),
    ({'model.rope_theta': 0}, 'rope_theta', '0', 'positive number'),
    ({'model.norm_eps': float('inf')}, 'norm_eps', 'inf', 'positive number'),
    ({'model.init_std': '0.02'}, 'init_std', "'0.02'", 'positive number'),
    ({'model.init_device': 'cuda'}, 'model.init_device', "'cuda'", 'cpu, meta, mixed'),
    ({'model.tie_word_embeddings': True}, 'tie_word_embeddings', 'True', 'no such key'),
]
EXPERTS = [
    ({'model.n_experts': 1}, 'n_experts', '1', 'at least 2'),
    ({'model.n_experts': -8}, 'n_experts', '-8', 'at least 0'),
    ({'model.n_experts': 4, 'model.expert_top_k': 5}, 'expert_top_k', '5', 'at most n_experts'),
    ({'model.n_experts': 4, 'model.expert_top_k': 0}, 'expert_top_k', '0', 'positive integer'),
    ({'model.expert_top_k': 1}, 'expert_top_k', '1', 'set n_experts'),
    ({'model.router_z_coef': 0.1}, 'router_z_coef', '0.1', 'set n_experts'),
    (
        {'model.n_experts': 4, 'model.load_balancing_coef': -0.01},
        'load_balancing_coef',
        '-0.01',
        'at least 0',
    ),
    (
        {
            'model.n_experts': 4,
            'model.expert_top_k': 1,
            'model.normalize_expert_weights': True,
        },
        'normalize_expert_weights',
        'True',
        'set normalize_expert_weights=False',
    ),
]
LENGTHS_AND_SIZES = [
    ({'max_seq_len': 1}, 'max_seq_len', '1', 'at least 2'),
    ({'max_seq_len': '32'}, 'max_seq_len', "'32'", 'integer'),
    ({'max_seq_len': 32.0}, 'max_seq_len', '32.0', 'integer'),
    ({'model.max_seq_len': 64}, 'model.max_seq_len', '64', 'max_seq_len'),
    (
        {'eval_loader.dataset.max_seq_len': 16},
        'eval_loader.dataset.max_seq_len',
        '16',
        r'\$\{max_seq_len\}',
    ),
    (
        {'train_loader.dataset.max_seq_len': REMOVED},
        'train_loader.dataset.max_seq_len',
        'missing',
        r'\$\{max_seq_len\}',
    ),
    ({'global_train_batch_size': 0}, 'global_train_batch_size', '0', 'at least 1'),
    ({'global_train_batch_size': 8.5}, 'global_train_batch_size', '8.5', 'integer'),
    ({'global_train_batch_size': None}, 'global_train_batch_size', 'missing', 'needs it'),
    ({'device_eval_batch_size': REMOVED}, 'device_eval_batch_size', 'missing', 'needs it'),
    ({'device_eval_batch_size': -4}, 'device_eval_batch_size', '-4', 'at least 1'),
    ({'device_train_microbatch_size': 0}, 'device_train_microbatch_size', '0', 'at least 1'),
    (
        {'device_train_microbatch_size': 'all'},
        'device_train_microbatch_size',
        "'all'",
        'number of rows',
    ),
    ({'max_duration': 'forever'}, 'max_duration', "'forever'", 'for example 200ba'),
    ({'max_duration': '0ba'}, 'max_duration', "'0ba'", 'at least 1'),
    ({'max_duration': '0.5dur'}, 'max_duration', "'0.5dur'", 'for example 200ba'),
    ({'eval_interval': '10 steps'}, 'eval_interval', "'10 steps'", 'for example'),
    ({'save_interval': '-5ba'}, 'save_interval', "'-5ba'", 'at least 1'),
    ({'seed': -1}, 'seed', '-1', 'at least 0'),
    ({'seed': '6198'}, 'seed', "'6198'", 'integer'),
    ({'eval_subset_num_batches': 0}, 'eval_subset_num_batches', '0', 'or -1 for all'),
]
DEVICES = [
    ({'precision': 'bf16'}, 'precision', "'bf16'", 'one of fp32'),
    pytest.param(
        *({'precision': 'amp_bf16'}, 'precision', 'amp_bf16', 'set precision=fp32'),
        id='amp-on-cpu',
    ),
    ({'device_train_microbatch_size': 'auto'}, 'device_train_microbatch_size', 'auto', 'give the'),
    (
        {'fsdp_config.sharding_strategy': 'ZERO3'},
        'fsdp_config.sharding_strategy',
        "'ZERO3'",
        'FULL_SHARD',
    ),
    (
        {'fsdp_config.shard_strategy': 'FULL_SHARD'},
        'fsdp_config.shard_strategy',
        "'FULL_SHARD'",
        'did you mean sharding_strategy',
    ),
    ({'fsdp_config.state_dict_type': 'local'}, 'fsdp_config.state_dict_type', "'local'", 'sharded'),
    (
        {'fsdp_config.activation_checkpointing': True},
        'fsdp_config.activation_checkpointing_reentrant',
        'true',
        'reentrant=false',
    ),
    (
        {
            'fsdp_config.activation_checkpointing': True,
            'fsdp_config.activation_checkpointing_reentrant': False,
            'model.activation_checkpointing': True,
        },
        'model.activation_checkpointing',
        'true',
        'keep the one',
    ),
    (
        {'fsdp_config.use_orig_params': False, 'algorithms.alrs': {}},
        'fsdp_config.use_orig_params',
        'false',
        'set fsdp_config.use_orig_params: true',
    ),
]
DATA = [
    ({'train_loader.name': 'texts'}, 'train_loader.name', "'texts'", 'did you mean text'),
    ({'train_loader.dataset': None}, 'train_loader.dataset', 'missing', 'needs it'),
    ({'train_loader.drop_last': REMOVED}, 'train_loader.drop_last', 'missing', 'needs it'),
    ({'train_loader.workers': 2}, 'train_loader.workers', '2', 'did you mean num_workers'),
    (
        {'train_loader.prefetch_factor': 2},
        'train_loader.prefetch_factor',
        '2',
        'prefetch_factor: null',
    ),
    (
        {'eval_loader.persistent_workers': True},
        'eval_loader.persistent_workers',
        'True',
        'persistent_workers: false',
    ),
    (
        {'train_loader.dataset.shufle': True},
        'train_loader.dataset.shufle',
        'True',
        'did you mean shuffle',
    ),
    (
        {'train_loader.dataset.shuffle': 'yes'},
        'train_loader.dataset.shuffle',
        "'yes'",
        'true or false',
    ),
    (
        {'train_loader.dataset.local': REMOVED},
        'train_loader.dataset.local',
        'None',
        'give one of local',
    ),
    (
        {'train_loader.dataset.local': '/nowhere'},
        'train_loader.dataset.local',
        "'/nowhere'",
        'Prepare the data',
    ),
    ({'train_loader.dataset.split': 'test'}, 'split', "'test'", 'Prepare the data'),
    ({'train_loader.dataset.split': 'val'}, 'eval_loader.dataset.local', 'val', 'its own'),
    ({'train_loader.dataset.cache_limit': '1mb'}, 'cache_limit', "'1mb'", 'Remove cache_limit'),
    ({'tokenizer.name': '/nowhere/tokenizer'}, 'tokenizer.name', "'/nowhere", 'give the folder'),
    ({'tokenizer.name': REMOVED}, 'tokenizer.name', 'None', 'add it'),
    ({'tokenizer': 't5-base'}, 'tokenizer', "'t5-base'", 'a mapping'),
    ({'tokenizer.kwargs': 32}, 'tokenizer.kwargs', '32', 'a mapping'),
    ({'model.vocab_size': 1000}, 'model.vocab_size', '1000', 'at least that'),
]
OPTIMISATION = [
    ({'optimizer.name': 'adam'}, 'optimizer.name', "'adam'", 'did you mean adamw'),
    ({'optimizer.lr': REMOVED}, 'optimizer.lr', 'missing', 'give the peak'),
    ({'optimizer.lr': '1e-3x'}, 'optimizer.lr', "'1e-3x'", 'number above 0'),
    ({'optimizer.lr': 0}, 'optimizer.lr', '0', 'above 0'),
    ({'optimizer.betas': [0.9]}, 'optimizer.betas', '[0.9]', 'two numbers'),
    ({'optimizer.betas': [0.9, 1.0]}, 'optimizer.betas', '[0.9, 1.0]', 'two numbers'),
    ({'optimizer.weight_decay': -0.1}, 'optimizer.weight_decay', '-0.1', 'at least 0'),
    ({'optimizer.wd': 0.1}, 'optimizer.wd', '0.1', 'no such key'),
    ({'scheduler.name': 'cosine'}, 'scheduler.name', "'cosine'", 'cosine_with_warmup'),
    ({'scheduler.t_warmup': '10%'}, 'scheduler.t_warmup', "'10%'", 'for example 0.1dur'),
    ({'scheduler.t_warmup': REMOVED}, 'scheduler.t_warmup', 'missing', 'needs it'),
    ({'scheduler.warmup': '1ba'}, 'scheduler.warmup', "'1ba'", 'did you mean t_warmup'),
    ({'scheduler.alpha_f': -0.1}, 'scheduler.alpha_f', '-0.1', 'at least 0'),
    (
        {'algorithms.gradient_clipping.clipping_type': 'L2'},
        'algorithms.gradient_clipping.clipping_type',
        "'L2'",
        'norm, value',
    ),
    (
        {'algorithms.gradient_clipping.clipping_threshold': 0},
        'algorithms.gradient_clipping.clipping_threshold',
        '0',
        'above 0',
    ),
    ({'algorithms.alr': {}}, 'algorithms.alr', "'alr'", 'did you mean alrs'),
]
ALRS = [
    ({'algorithms.alrs.mode': 'static'}, 'alrs.mode', "'static'", 'choose one of'),
    ({'algorithms.alrs.interval': '5ba'}, 'algorithms.alrs.interval', "'5ba'", 'did you mean'),
    ({'algorithms.alrs': 'on'}, 'algorithms.alrs', "'on'", 'for the defaults'),
    ({'algorithms.alrs.update_interval': '0ba'}, 'alrs.update_interval', "'0ba'", 'at least 1'),
    ({'algorithms.alrs.update_interval': '1ep'}, 'alrs.update_interval', "'1ep'", '100ba'),
    ({'algorithms.alrs.transition': 'half'}, 'alrs.transition', "'half'", '100ba'),
    ({'algorithms.alrs.window': '-0.2dur'}, 'alrs.window', "'-0.2dur'", '0.2dur'),
    ({'algorithms.alrs.window': 'short'}, 'alrs.window', "'short'", '0.2dur'),
    ({'algorithms.alrs.multiplier_range': [5, 1]}, 'alrs.multiplier_range', '[5, 1]', 'ascending'),
    ({'algorithms.alrs.multiplier_range': 5}, 'alrs.multiplier_range', '5', 'ascending'),
    ({'algorithms.alrs.tail_fraction': 0}, 'alrs.tail_fraction', '0', r'in \(0, 1\]'),
    ({'algorithms.alrs.tail_fraction': 'half'}, 'alrs.tail_fraction', "'half'", r'in \(0, 1\]'),
    ({'algorithms.alrs.pool': ['attn']}, 'alrs.pool', "['attn']", 'attention'),
    ({'algorithms.alrs.estimator': 'svd'}, 'alrs.estimator', "'svd'", 'choose one of'),
    ({'algorithms.alrs.decoder_boost': 1.5}, 'alrs.decoder_boost', '1.5', 'static_decoder_boost'),
    ({'algorithms.alrs.exclude': '['}, 'alrs.exclude', "'['", 'a list of'),
    ({'algorithms.alrs.exclude': ['[']}, 'alrs.exclude', "'['", 'regular expression'),
]
RUN = [
    ({'max_seqlen': 32}, 'max_seqlen', '32', 'did you mean max_seq_len'),
    ({'callbacks.harnes': {}}, 'callbacks.harnes', "'harnes'", 'did you mean harness'),
    (
        {'callbacks.results_writer.path': 'x'},
        'callbacks.results_writer.path',
        "'x'",
        'no such key',
    ),
    ({'callbacks.results_writer': {}}, 'callbacks.results_writer.folder', 'missing', 'needs it'),
    (
        {'callbacks.harness': {'folder': 'x', 'tasks': ['mmlu']}},
        'harness.tasks',
        "'mmlu'",
        'leave it out',
    ),
    (
        {'callbacks.harness': {'folder': 'x', 'interval': 'often'}},
        'harness.interval',
        "'often'",
        '1000ba',
    ),
    (
        {'callbacks.spectrum_monitor': {'interval': '1ep'}},
        'spectrum_monitor.interval',
        "'1ep'",
        'ba',
    ),
    ({'loggers.wandbb': {}}, 'loggers.wandbb', "'wandbb'", 'did you mean wandb'),
    ({'save_folder': None}, 'save_folder', 'None', 'autoresume: false'),
    ({'run_name': None}, 'run_name', 'None', 'autoresume: false'),
    ({'save_overwrite': True}, 'save_overwrite', 'true', 'autoresume: false'),
    ({'save_num_checkpoints_to_keep': 0}, 'save_num_checkpoints_to_keep', '0', 'or -1 for all'),
    ({'load_weights_only': True}, 'load_weights_only', 'true', 'give load_path'),
    ({'load_path': '/nowhere/ep0-ba1-rank0.pt'}, 'load_path', "'/nowhere", 'Give the .pt file'),
    ({'load_ignore_keys': 'state/*'}, 'load_ignore_keys', "'state/\\*'", 'a list'),
]
SFT_LOADER = {
    'name': 'finetuning',
    'dataset': {
        'remote': '/nowhere',
        'local': '/nowhere',
        'split': 'train',
        'shuffle': True,
        'max_seq_len': 32,
        'decoder_only_format': True,
        'target_prompts': 'none',
        'target_responses': 'last',
    },
    'num_workers': 0,
    'prefetch_factor': None,
    'persistent_workers': False,
}


def sft(**dataset):
    loader = copy.deepcopy(SFT_LOADER)
    for key, value in dataset.items():
        if value is REMOVED:
            del loader['dataset'][key]
        else:
            loader['dataset'][key] = value
    return {'train_loader': loader}


SFT = [
    (sft(), 'train_loader.dataset.remote', "'/nowhere'", 'convert_gsm8k.py'),
    (sft(remote=None), 'train_loader.dataset.local', "'/nowhere'", 'remote to the same folder'),
    (
        sft(decoder_only_format=False),
        'train_loader.dataset.decoder_only_format',
        'False',
        'decoder_only_format: true',
    ),
    (
        sft(decoder_only_format=REMOVED),
        'train_loader.dataset.decoder_only_format',
        'None',
        'decoder_only_format: true',
    ),
    (sft(max_seq_len=64), 'train_loader.dataset.max_seq_len', '64', 'max_seq_len'),
    (sft(packing_ratio=3.0), 'train_loader.dataset.packing_ratio', '3.0', 'remove the key'),
    (sft(target_prompt='none'), 'train_loader.dataset.target_prompt', "'none'", 'target_prompts'),
    (sft(remote=None, local=None), 'train_loader.dataset.local', 'None', 'hf_name'),
]
INVALID = [
    *MODEL,
    *EXPERTS,
    *LENGTHS_AND_SIZES,
    *DEVICES,
    *DATA,
    *OPTIMISATION,
    *ALRS,
    *RUN,
    *SFT,
]


def row_id(value):
    if isinstance(value, dict):
        return ','.join(f'{k.split(".", 1)[-1]}={str(v)[:12]}' for k, v in value.items())[:60]
    return ''


def test_the_tiny_configuration_is_valid(tiny):
    start(copy.deepcopy(tiny))


def test_the_table_is_long_enough():
    assert len(INVALID) >= 60


@pytest.mark.parametrize(('changes', 'key', 'value', 'remedy'), INVALID, ids=row_id)
def test_one_error_names_key_value_and_remedy(tiny, changes, key, value, remedy):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        start(changed(tiny, changes))
    message = str(caught.value)
    assert key in message
    assert value.replace('\\', '') in message or re.search(value, message)
    assert re.search(remedy, message), message
    assert '\n' not in message


SIZES = {'vocab_size': 64, 'max_seq_len': 16}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(-1, 9), st.text(max_size=4)
)
LIKELY = {
    'd_model': st.sampled_from([8, 12, 16, 24]),
    'n_heads': st.integers(0, 4),
    'n_kv_heads': st.sampled_from([None, 1, 2, 3]),
    'd_ff': st.integers(1, 24),
    'n_encoder_layers': st.integers(0, 2),
    'n_decoder_layers': st.integers(0, 2),
    'num_iterations': st.integers(0, 3),
    'global_kv': st.booleans(),
    'local_kv': st.booleans(),
    'qk_norm': st.sampled_from(['none', 'decoder', 'all', 'encoder']),
    'input_injection': st.sampled_from(['none', 'additive']),
    'rope_theta': st.floats(1, 1e6),
    'norm_eps': st.floats(1e-8, 1e-3),
    'init_std': st.floats(0.01, 1),
    'init_cutoff': st.sampled_from([None, 0, 2.0, 3]),
    'n_experts': st.integers(0, 4),
    'expert_top_k': st.integers(0, 4),
    'normalize_expert_weights': st.booleans(),
    'load_balancing_coef': st.floats(0, 1),
    'router_z_coef': st.floats(0, 1),
    'attn_backend': st.sampled_from(['auto', 'reference', 'cpu_flash']),
    'activation_checkpointing': st.booleans(),
    'use_cache': st.booleans(),
    'typo': st.integers(),
}


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_model_configuration_builds_and_runs_or_one_error_names_a_key(data):
    keys = data.draw(st.sets(st.sampled_from(sorted(LIKELY)), min_size=1, max_size=7))
    spoiled = data.draw(st.sampled_from([None, None, None, *sorted(keys)]))
    drawn = {
        key: data.draw(ANYTHING if key == spoiled else LIKELY[key], label=key)
        for key in sorted(keys)
    }
    small = {'d_model': 8, 'n_heads': 2, 'd_ff': 8, 'n_encoder_layers': 1, 'n_decoder_layers': 1}
    built = []
    message = refusal(lambda: built.append(ComposerAsymLoopCausalLM(**{**SIZES, **small, **drawn})))
    if message is not None:
        assert any(key in message for key in AsymLoopConfig.field_names() | {'typo'}), message
        return
    model = built[0]
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    batch = {'input_ids': ids, 'labels': ids}
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(model.forward(batch)['loss'])


NUMBERS = st.one_of(ANYTHING, st.sampled_from(['1ba', '0.1dur', '3ep', 'auto', '1e-3', [1], {}]))
KEYS = (
    'max_seq_len',
    'max_duration',
    'global_train_batch_size',
    'device_train_microbatch_size',
    'device_eval_batch_size',
    'eval_interval',
    'save_interval',
    'save_num_checkpoints_to_keep',
    'seed',
    'precision',
    'optimizer.lr',
    'optimizer.betas',
    'optimizer.eps',
    'optimizer.weight_decay',
    'scheduler.t_warmup',
    'scheduler.alpha_f',
    'algorithms.gradient_clipping.clipping_threshold',
    'train_loader.num_workers',
    'train_loader.drop_last',
    'train_loader.dataset',
    'train_loader.dataset.shuffle',
    'train_loader',
    'tokenizer',
    'model.d_ff',
    'algorithms',
    'callbacks',
    'fsdp_config',
    'load_ignore_keys',
)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(key=st.sampled_from(KEYS), value=NUMBERS)
def test_any_value_of_a_runs_key_is_accepted_or_one_error_names_it(tiny, key, value):
    message = refusal(lambda: check_run(changed(tiny, {key: value})))
    assert message is None or (key.split('.')[0] in message and '\n' not in message)


ALRS_KEYS = st.fixed_dictionaries(
    {},
    optional={
        'mode': st.sampled_from(['alrs', 'uniform', 'static_decoder_boost']),
        'multiplier_range': st.one_of(NUMBERS, st.lists(st.floats(0, 9), min_size=2, max_size=2)),
        'update_interval': NUMBERS,
        'transition': NUMBERS,
        'window': NUMBERS,
        'tail_fraction': NUMBERS,
        'decoder_boost': NUMBERS,
        'exclude': st.one_of(NUMBERS, st.lists(st.text(max_size=3), max_size=2)),
        'pool': st.one_of(NUMBERS, st.just(['attention'])),
        'legacy_window_cut': st.booleans(),
        'log_interval': NUMBERS,
    },
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(keys=ALRS_KEYS)
def test_any_keys_of_alrs_are_accepted_or_one_error_names_one(keys):
    message = refusal(lambda: build_algorithm('alrs', keys))
    assert message is None or 'alrs.' in message
