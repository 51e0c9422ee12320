# SPDX-License-Identifier: Apache-2.0
"""What a training configuration must satisfy before anything is built.

Foundry runs every registered config transform on every ``train``; this one changes nothing and raises
where the run would fail later, or worse, succeed with wrong numbers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from composer.utils import dist, get_device
from llmfoundry.utils.builders import build_tokenizer

from asymloop_foundry.data.checks import check_loaders, check_tokenizer, check_training_data
from asymloop_foundry.data.streaming_fixes import fail_on_unreadable_shards
from asymloop_foundry.resume import check_load_path, prepare_to_resume

MODEL_NAME = 'asymloop_causal_lm'
REQUIRED = (
    'max_seq_len',
    'max_duration',
    'global_train_batch_size',
    'model',
    'tokenizer',
    'optimizer',
    'scheduler',
    'train_loader',
)


def preflight(cfg: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration of this family as it came, or says what is wrong with it.

    Configurations of other models pass unread.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    model = cfg.get('model')
    if not isinstance(model, Mapping) or model.get('name') != MODEL_NAME:
        return cfg
    for key in REQUIRED:
        if cfg.get(key) is None:
            raise ValueError(f'{key} is missing; every training configuration needs it.')
    _check_lengths(cfg, model)
    _check_device(cfg)
    _check_checkpointing(cfg, model)
    _check_data(cfg)
    prepare_to_resume(cfg)
    check_load_path(cfg)
    fail_on_unreadable_shards()
    return cfg


def _text_loaders(cfg: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Each loader of Foundry's ``text`` kind, by its key."""
    loaders = [('train_loader', cfg['train_loader'])]
    if cfg.get('eval_loader'):
        loaders.append(('eval_loader', cfg['eval_loader']))
    for i, loader in enumerate(cfg.get('eval_loaders') or []):
        loaders.append((f'eval_loader[{i}]', loader))
    for key, loader in loaders:
        if loader.get('name') == 'text':
            yield key, loader


def _check_lengths(cfg: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    length = cfg['max_seq_len']
    if not isinstance(length, int) or isinstance(length, bool) or length < 2:
        raise ValueError(f'max_seq_len={length!r} must be an integer of at least 2.')
    others = [('model.max_seq_len', model.get('max_seq_len'))]
    for key, loader in _text_loaders(cfg):
        others.append((f'{key}.dataset.max_seq_len', loader['dataset'].get('max_seq_len')))
    for key, value in others:
        if value is not None and value != length:
            raise ValueError(
                f'{key}={value} differs from max_seq_len={length}; write {key}: ${{max_seq_len}}.'
            )


def _check_device(cfg: Mapping[str, Any]) -> None:
    if torch.cuda.is_available():
        return
    precision = cfg.get('precision', 'amp_bf16')
    if precision != 'fp32':
        raise ValueError(
            f'precision={precision}: Composer trains in fp32 alone on a CPU; set precision=fp32.'
        )
    microbatch = cfg.get('device_train_microbatch_size', 'auto')
    if microbatch == 'auto':
        raise ValueError(
            'device_train_microbatch_size=auto needs a GPU, whose memory it probes; on a CPU give '
            'the number of rows.'
        )


def _check_checkpointing(cfg: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    fsdp = cfg.get('fsdp_config') or {}
    if not fsdp.get('activation_checkpointing', False):
        return
    if fsdp.get('activation_checkpointing_reentrant', True):
        raise ValueError(
            'fsdp_config.activation_checkpointing_reentrant=true (its default): a decoder layer is '
            'called num_iterations times in one forward pass, which reentrant checkpointing counts '
            'as one; set fsdp_config.activation_checkpointing_reentrant=false.'
        )
    if model.get('activation_checkpointing', False):
        raise ValueError(
            'model.activation_checkpointing=true and fsdp_config.activation_checkpointing=true would '
            'recompute each layer twice; keep the one in fsdp_config, or the one in model for runs '
            'without FSDP.'
        )


def _check_data(cfg: Mapping[str, Any]) -> None:
    tokenizer = cfg['tokenizer']
    name, kwargs = tokenizer['name'], dict(tokenizer.get('kwargs') or {})
    # Foundry fetches a tokenizer once a node, for which its ranks must know each other.
    dist.initialize_dist(get_device(None), timeout=cfg.get('dist_timeout', 600.0))
    try:
        built = build_tokenizer(name, kwargs)
    except ValueError as error:
        if 'eos_token' not in str(error):
            raise
        raise ValueError(
            f'tokenizer.name={name!r} has no EOS token, so documents would run into each other; '
            'choose another tokenizer, or give one of its reserved tokens as '
            'tokenizer.kwargs.eos_token.'
        ) from error
    check_tokenizer(built)
    for key, loader in _text_loaders(cfg):
        check_training_data(loader['dataset'], built, cfg['max_seq_len'], f'{key}.dataset')
    check_loaders(cfg['train_loader'], cfg.get('eval_loaders') or cfg.get('eval_loader'))
