# SPDX-License-Identifier: Apache-2.0
"""A model and its tokenizer from whatever training left: an exported folder or a Composer checkpoint."""

import datetime
import json
import pickle
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import get_file
from safetensors import SafetensorError
from torch import nn
from torch.torch_version import TorchVersion
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..models.configuration_asymloop import AsymLoopConfig
from ..models.modeling_asymloop import AsymLoopForCausalLM
from ..sharded import is_sharded, merge
from .tokenizers import without_special_tokens

__all__ = [
    'Loaded',
    'checkpoint_config',
    'checkpoint_tokenizer',
    'load',
    'local_copy',
    'read_checkpoint',
]

# What a Composer checkpoint holds beside tensors and plain values: random states and versions.
_HARMLESS: list[Any] = [
    np.dtype,
    np.ndarray,
    np.dtypes.UInt32DType,
    datetime.timedelta,
    TorchVersion,
    np.empty(0).__reduce__()[0],
]

_UNREADABLE = (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError, ImportError)


@dataclass
class Loaded:
    """A model that is ready to be scored.

    Attributes:
        model: in evaluation mode, on its device.
        tokenizer: one that adds no special token to a text.
        step: optimizer steps it was trained for, where the checkpoint says so.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    step: int | None


def load(
    source: str | Path,
    tokenizer: str | Path | None = None,
    num_iterations: int | None = None,
    device: str | torch.device = 'cpu',
    dtype: torch.dtype = torch.float32,
) -> Loaded:
    """Loads an exported folder (its own code included) or a Composer checkpoint.

    Args:
        source: a folder with ``config.json``, a checkpoint's ``.pt`` file, or the folder of a sharded
            checkpoint.
        tokenizer: a folder or hub name, where the source has none.
        num_iterations: K, where it should differ from the training's.
        device: where the weights go.
        dtype: their type.

    Raises:
        FileNotFoundError: there is no model at ``source``.
        ValueError: no tokenizer is known, or the model cannot run ``num_iterations``.
    """
    path = Path(source)
    if is_sharded(path):
        with tempfile.TemporaryDirectory() as scratch:
            merged = merge(path, Path(scratch) / 'merged.pt')
            return load(merged, tokenizer, num_iterations, device, dtype)
    step = None
    if (path / 'config.json').is_file():
        with _naming(path, 'the exported folder'):
            model = AutoModelForCausalLM.from_pretrained(
                str(path), trust_remote_code=True, torch_dtype=dtype
            )
        named = AutoTokenizer.from_pretrained(str(tokenizer or path))
    elif path.is_file():
        state = read_checkpoint(path)
        step = int(state['timestamp']['Timestamp']['batch'])
        model = AsymLoopForCausalLM(checkpoint_config(state)).to(dtype)
        model.load_state_dict(_weights(state, model))
        named = checkpoint_tokenizer(state) if tokenizer is None else None
        named = named or AutoTokenizer.from_pretrained(_named(tokenizer, path))
    else:
        raise FileNotFoundError(
            f'{source}: give a Composer checkpoint (a .pt file, or the folder of a sharded one) or an '
            'exported folder, which has a config.json.'
        )
    if num_iterations is not None:
        model.config.num_iterations = model.config.check_iterations(num_iterations)
    return Loaded(model.to(device).eval(), without_special_tokens(named), step)


@contextmanager
def _naming(path: str | Path, what: str) -> Iterator[None]:
    """Turns what readers raise for a damaged, foreign or malicious file into one line with its name."""
    try:
        yield
    except (*_UNREADABLE, SafetensorError) as error:
        found = re.search(r'Unsupported [^\n]*? was not', str(error))
        reason = (
            f'it holds objects that no checkpoint of ours holds ({found[0]} allowed), and was not unpickled'
            if found
            else str(error).strip().split('\n')[0] or type(error).__name__
        )
        raise ValueError(
            f'{path} cannot be loaded: {reason}. Give {what} that training or export wrote, whole.'
        ) from error


@contextmanager
def local_copy(source: str) -> Iterator[Path]:
    """The checkpoint itself, or for an ``s3://``, ``gs://`` or ``oci://`` one a copy while in use."""
    if '://' not in source:
        yield Path(source)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source.rsplit('/', 1)[1]
        get_file(source, str(path), progress_bar=True)
        yield path


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The ``state`` of a Composer checkpoint, unpickling nothing but tensors and plain values.

    Raises:
        ValueError: the file is no Composer checkpoint with a Hugging Face model in it.
    """
    with _naming(path, 'the .pt file'), torch.serialization.safe_globals(_HARMLESS):
        content = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    state = content.get('state', {}) if isinstance(content, dict) else {}
    if 'model' not in state or 'huggingface' not in state.get('integrations', {}):
        raise ValueError(
            f'{path} is no Composer checkpoint of a Hugging Face model; give the .pt file that '
            'training saved.'
        )
    return state


def checkpoint_config(state: Mapping[str, Any]) -> AsymLoopConfig:
    """The configuration that a checkpoint was trained with."""
    content = dict(state['integrations']['huggingface']['model']['config']['content'])
    return AsymLoopConfig(**{k: v for k, v in content.items() if k in AsymLoopConfig.field_names()})


def checkpoint_tokenizer(state: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a checkpoint carries, if any."""
    files = state['integrations']['huggingface'].get('tokenizer') or {}
    if not files:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in files.items():
            content = entry['content']
            if entry['file_extension'] == '.json':
                content = json.dumps(content)
            elif isinstance(content, list):
                content = '\n'.join(content)
            if isinstance(content, str):
                (Path(folder) / name).write_text(content, encoding='utf-8')
        return AutoTokenizer.from_pretrained(folder)


def _weights(state: Mapping[str, Any], model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights under its own names, whatever wrapped it in training."""
    names = set(model.state_dict())
    found = {}
    for name, tensor in state['model'].items():
        plain = name.replace('_fsdp_wrapped_module.', '').replace('_checkpoint_wrapped_module.', '')
        plain = plain.replace('_orig_mod.', '').removeprefix('module.').removeprefix('model.')
        if plain in names:
            found[plain] = tensor
    return found


def _named(tokenizer: str | Path | None, path: Path) -> str:
    if tokenizer is None:
        raise ValueError(f'{path} carries no tokenizer; name it with --tokenizer.')
    return str(tokenizer)
