# SPDX-License-Identifier: Apache-2.0
"""The systems that the paper compares, as model fields of the family's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..models.configuration_asymloop import AsymLoopConfig
from .paper import ARCHITECTURES

__all__ = ['SYSTEMS', 'Backbone', 'backbone', 'config_of', 'model_fields']

# Table 10: the FFN that makes Full Loop's training FLOPs AsymLoop's, as a share of the default width.
WIDENED_FFN = 2656 / 2048


@dataclass(frozen=True)
class Backbone:
    """Sizes that all systems of one comparison share.

    Attributes:
        n_layers: L, layers that have parameters.
        d_model: d.
        d_ff: m, of one expert where there are experts.
        n_heads: attention heads.
        vocab_size: V.
        max_seq_len: N.
        extra: further model fields, such as an initialisation or experts.
    """

    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int
    vocab_size: int = 32128
    max_seq_len: int = 1024
    extra: Mapping[str, Any] = field(default_factory=dict)


def backbone(scale: str) -> Backbone:
    """The backbone of a scale of Table 5."""
    size = ARCHITECTURES[scale]
    return Backbone(size.layers, size.d_model, size.d_ff, size.n_heads)


def model_fields(
    system: str, size: Backbone, num_iterations: int = 1, qk_norm: str | None = None
) -> dict[str, Any]:
    """Every model field that says where a system stands in the family.

    Args:
        system: a key of :data:`SYSTEMS`.
        size: the backbone.
        num_iterations: K.
        qk_norm: where queries and keys are normalised; the system's own choice when ``None``
            (the decoder for systems with an encoder, nowhere for Dense and Full Loop).

    Raises:
        KeyError: no system has that name.
    """
    fields: dict[str, Any] = {
        'vocab_size': size.vocab_size,
        'd_model': size.d_model,
        'n_heads': size.n_heads,
        'd_ff': size.d_ff,
        'max_seq_len': size.max_seq_len,
        'n_encoder_layers': size.n_layers // 2,
        'n_decoder_layers': size.n_layers - size.n_layers // 2,
        'num_iterations': num_iterations,
        'global_kv': True,
        'local_kv': True,
        'qk_norm': 'decoder',
        'input_injection': 'none',
        **size.extra,
        **SYSTEMS[system](size),
    }
    if qk_norm is not None:
        fields['qk_norm'] = qk_norm
    return fields


def config_of(
    system: str, size: Backbone, num_iterations: int = 1, qk_norm: str | None = None
) -> AsymLoopConfig:
    """The configuration of a system; the arguments are those of :func:`model_fields`."""
    return AsymLoopConfig(**model_fields(system, size, num_iterations, qk_norm))


def _dense(size: Backbone) -> dict[str, Any]:
    return {'n_encoder_layers': size.n_layers, 'n_decoder_layers': 0, 'qk_norm': 'none'}


def _full_loop(size: Backbone) -> dict[str, Any]:
    return {
        'n_encoder_layers': 0,
        'n_decoder_layers': size.n_layers,
        'global_kv': False,
        'qk_norm': 'none',
    }


def _full_loop_wide(size: Backbone) -> dict[str, Any]:
    return {**_full_loop(size), 'd_ff': round(WIDENED_FFN * size.d_ff)}


def _param_matched(size: Backbone) -> dict[str, Any]:
    """Spends the parameters of the Global projections, 2 D d^2, on the FFN of all L layers."""
    n_decoder_layers = size.n_layers - size.n_layers // 2
    wider = round(2 * n_decoder_layers * size.d_model / (3 * size.n_layers))
    return {'global_kv': False, 'd_ff': size.d_ff + wider}


SYSTEMS = {
    'dense': _dense,
    'full-loop': _full_loop,
    'full-loop-wide': _full_loop_wide,
    'asymloop': lambda size: {},
    'no-global-kv': lambda size: {'global_kv': False},
    'no-local-kv': lambda size: {'local_kv': False},
    'param-matched': _param_matched,
    'additive-injection': lambda size: {'global_kv': False, 'input_injection': 'additive'},
}
