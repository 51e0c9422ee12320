# SPDX-License-Identifier: Apache-2.0
"""Which parameter plays which part: found by the name of the weight and the type of its module.

Serves every model of the family, Foundry's MPT and Hugging Face Llama; nothing here knows a model
class.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ['MATRIX_KINDS', 'Role', 'group_mean', 'roles_of']

MATRIX_KINDS = ('attention', 'ffn', 'global')
"""The kinds whose weights the paper decomposes."""

_KIND_PATTERNS = (
    ('global', re.compile(r'(?:^|\.)global_kv\.(?:.+\.)?[kv]_proj\.weight$')),
    (
        'attention',
        re.compile(r'\.(?:attn|self_attn)\.(?:[qkvo]_proj|W[qkv]|Wqkv|Wkv|out_proj)\.weight$'),
    ),
    # One expert is one matrix, as experts.3.gate_proj.weight or as experts.gate_proj.3.
    ('ffn', re.compile(r'\.(?:ffn|mlp)\.(?:.+\.)?(?:gate|up|down)_proj(?:\.weight|\.\d+)?$')),
    ('head', re.compile(r'(?:^|\.)lm_head\.weight$')),
)
_FUSED = re.compile(r'\.(?:Wqkv|Wkv)\.weight$')
_ROUTER = re.compile(r'(?:^|\.)(?:router|gate)(?:\.\w+)*\.weight$')


@dataclass(frozen=True)
class Role:
    """Where a parameter sits.

    Attributes:
        stack: ``encoder``, ``decoder`` (with its Global projections), or ``layers`` for a model
            with one stack under another name.
        kind: ``attention``, ``ffn``, ``global``, ``embedding``, ``head``, or ``other``.
        shape: Of the whole parameter.
    """

    stack: str
    kind: str
    shape: torch.Size


def _kind(name: str, module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return 'embedding'
    for kind, pattern in _KIND_PATTERNS:
        if pattern.search(name):
            return kind
    return 'other'


def _stack(name: str, kind: str) -> str:
    parts = name.split('.')
    if 'decoder' in parts or kind == 'global':
        return 'decoder'
    return 'encoder' if 'encoder' in parts else 'layers'


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Role of every trainable parameter of a model that nothing wraps yet, in its own order.

    Warns about weights of ``nn.Linear`` modules that no pattern knows (they count as ``other``) and
    about fused projections, which have one spectrum and one learning rate for all their parts.
    """
    modules = dict(model.named_modules())
    roles = {}
    unknown = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        module = modules.get(name.rpartition('.')[0], model)
        kind = _kind(name, module)
        roles[name] = Role(_stack(name, kind), kind, parameter.shape)
        matrix = isinstance(module, nn.Linear) and parameter.dim() == 2
        if kind == 'other' and matrix and not _ROUTER.search(name):
            unknown.append(name)
    if unknown:
        warnings.warn(
            f'{len(unknown)} linear weights have no known role and keep the base learning rate: '
            f'{", ".join(unknown[:4])}{" ..." if len(unknown) > 4 else ""}.',
            stacklevel=2,
        )
    fused = [name for name in roles if _FUSED.search(name)]
    if fused:
        warnings.warn(
            f'{fused[0]} and {len(fused) - 1} more hold several projections in one matrix, which '
            'get one spectrum and one learning rate together. Set attn_config.fused_qkv: false to '
            'treat them one by one, as the paper does.',
            stacklevel=2,
        )
    return roles


def group_mean(values: Mapping[str, float], roles: Mapping[str, Role]) -> dict[str, float]:
    """Mean over the matrices of each ``stack/kind``, every matrix counting once (Figures 3, 4).

    Args:
        values: One number per parameter name; a name that is not in ``roles`` is a matrix of a
            3-D parameter, ``name.index``.
        roles: See :func:`roles_of`.

    Returns:
        Keys such as ``encoder/attention``, ``decoder/ffn``, ``decoder/global``, in sorted order.
    """
    members: dict[str, list[float]] = {}
    for name, value in values.items():
        role = roles.get(name) or roles[name.rpartition('.')[0]]
        if role.kind in MATRIX_KINDS:
            members.setdefault(f'{role.stack}/{role.kind}', []).append(value)
    return {group: sum(found) / len(found) for group, found in sorted(members.items())}
