# SPDX-License-Identifier: Apache-2.0
"""What a training configuration must satisfy before anything is built.

Foundry runs every registered config transform on every ``train``; this one changes nothing and raises
where the run would fail later, or worse, succeed with wrong numbers.
"""

from collections.abc import Mapping
from typing import Any

from composer.utils import dist, get_device
from llmfoundry.utils.builders import build_tokenizer
from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data.checks import (
    check_finetuning_data,
    check_loaders,
    check_tokenizer,
    check_training_data,
)
from asymloop_foundry.data.streaming_fixes import fail_on_unreadable_shards
from asymloop_foundry.models.composer_asymloop import refuse_small_vocabulary
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.resume import check_load_path, prepare_to_resume
from asymloop_foundry.run_checks import check_run, loaders_of

__all__ = ['preflight']

MODEL_NAME = 'asymloop_causal_lm'


def preflight(cfg: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration of this family as it came, or says what is wrong with it.

    Configurations of other models pass unread.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    model = cfg.get('model')
    if not isinstance(model, Mapping) or model.get('name') != MODEL_NAME:
        return cfg
    check_run(cfg)
    _check_data(cfg)
    prepare_to_resume(cfg)
    check_load_path(cfg)
    fail_on_unreadable_shards()
    return cfg


def _check_data(cfg: Mapping[str, Any]) -> None:
    tokenizer = _tokenizer(cfg)
    check_tokenizer(tokenizer)
    for key, loader in loaders_of(cfg):
        check = {'text': check_training_data, 'finetuning': check_finetuning_data}.get(
            loader['name']
        )
        if check is not None:
            check(loader['dataset'], tokenizer, cfg['max_seq_len'], f'{key}.dataset')
    check_loaders(cfg['train_loader'], cfg.get('eval_loaders') or cfg.get('eval_loader'))
    vocab_size = cfg['model'].get('vocab_size', AsymLoopConfig().vocab_size)
    refuse_small_vocabulary(vocab_size, tokenizer)


def _tokenizer(cfg: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    name, kwargs = cfg['tokenizer']['name'], cfg['tokenizer'].get('kwargs') or {}
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f'tokenizer.kwargs={kwargs!r} must be a mapping, such as model_max_length: 1024.'
        )
    # Foundry fetches a tokenizer once a node, for which its ranks must know each other.
    dist.initialize_dist(get_device(None), timeout=cfg.get('dist_timeout', 600.0))
    try:
        return build_tokenizer(name, dict(kwargs))
    except ValueError as error:
        if 'eos_token' not in str(error):
            raise _unloadable(name, error) from error
        raise ValueError(
            f'tokenizer.name={name!r} has no EOS token, so documents would run into each other; '
            'choose another tokenizer, or give one of its reserved tokens as '
            'tokenizer.kwargs.eos_token.'
        ) from error
    # The tokenizers library raises plain Exception for a file that it cannot parse.
    except Exception as error:
        raise _unloadable(name, error) from error


def _unloadable(name: str, error: Exception) -> ValueError:
    reason = str(error).strip().split('\n')[0]
    return ValueError(
        f'tokenizer.name={name!r} cannot be loaded ({type(error).__name__}: {reason}); give the folder of '
        'a tokenizer, or the name of one on the hub, which needs a network or its cache.'
    )
