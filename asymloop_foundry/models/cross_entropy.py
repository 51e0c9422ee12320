# SPDX-License-Identifier: Apache-2.0
"""Next-token cross-entropy straight from the last hidden state, without the logits.

The logits of a batch are its largest tensor (V = 32,128 floats a token), and a loss needs them four
times over: as logits, in fp32, as probabilities and as their gradient. Here a chunk of positions at a
time is projected, turned into its share of the loss *and of both gradients*, and forgotten, so that
the memory depends on the chunk and no product is computed twice. The backward pass only scales.

Matrix products run in autocast's dtype where it is on; softmax, sums over chunks and the loss are in
fp32 (or fp64). The operator is registered with ``torch.library``: ``torch.compile`` traces it without
a graph break and ``FlopCounterMode`` counts it (all three products in the forward pass).

Shapes: B batch, N positions, D width, V vocabulary, M = B N rows, C rows of one chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .autocast import autocast_dtype

__all__ = ['linear_cross_entropy']


def linear_cross_entropy(
    x_BND: Tensor,
    weight_VD: Tensor,
    labels_BN: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = 'mean',
    chunk_size: int = 256,
) -> Tensor:
    """Cross-entropy of ``x @ weight.T`` against the *next* token of each position.

    The shift happens here: position i is scored against ``labels[:, i + 1]``, and the last position
    of each row against nothing.

    Args:
        x_BND: what the head would project.
        weight_VD: the head.
        labels_BN: token ids, aligned with the inputs (not shifted).
        ignore_index: label that does not count.
        reduction: ``mean`` over the labels that count, or their ``sum``.
        chunk_size: positions whose logits exist at a time.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs). Where no label counts it is 0 with zero gradients in
        either reduction, so that a fully padded microbatch adds nothing instead of a NaN.

    Raises:
        ValueError: shapes do not fit, or an option is unknown.
    """
    if reduction not in ('mean', 'sum'):
        raise ValueError(f'reduction={reduction!r} must be mean or sum.')
    if chunk_size < 1:
        raise ValueError(f'chunk_size={chunk_size} must be at least 1.')
    if x_BND.dim() != 3 or labels_BN.shape != x_BND.shape[:2]:
        raise ValueError(
            f'labels {tuple(labels_BN.shape)} do not fit hidden states {tuple(x_BND.shape)}: they '
            'must be (B, N) and (B, N, D).'
        )
    if weight_VD.dim() != 2 or weight_VD.shape[1] != x_BND.shape[2]:
        raise ValueError(
            f'head {tuple(weight_VD.shape)} does not fit hidden states {tuple(x_BND.shape)}: it must '
            'be (V, D).'
        )
    targets_M = F.pad(labels_BN[:, 1:], (0, 1), value=ignore_index).flatten()
    needs_grad = torch.is_grad_enabled()
    loss = torch.ops.asymloop.linear_cross_entropy.default(
        x_BND.flatten(0, 1),
        weight_VD,
        targets_M,
        ignore_index,
        chunk_size,
        autocast_dtype(x_BND) or x_BND.dtype,
        needs_grad and x_BND.requires_grad,
        needs_grad and weight_VD.requires_grad,
    )[0]
    if reduction == 'sum':
        return loss
    return loss / (targets_M != ignore_index).sum().clamp(min=1)


def _forward(
    x_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    ignore_index: int,
    chunk_size: int,
    dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses, and its gradients by x and by the weight (empty where not needed)."""
    exact = torch.promote_types(dtype, torch.float32)
    loss, dx_MD, dw_VD = _fake_forward(
        x_MD, weight_VD, targets_M, ignore_index, chunk_size, dtype, need_dx, need_dw
    )
    loss.zero_()
    weight = weight_VD.to(dtype)
    total = dw_VD if dw_VD.dtype == exact else dw_VD.to(exact)
    total.zero_()
    # Two buffers (one in full precision) serve every chunk: fresh pages would cost more than softmax.
    largest = min(chunk_size, x_MD.shape[0])
    logits = x_MD.new_empty(largest, weight.shape[0], dtype=dtype)
    wide = logits if dtype == exact else torch.empty_like(logits, dtype=exact)
    for start in range(0, x_MD.shape[0], chunk_size):
        rows = slice(start, start + chunk_size)
        x_CD = x_MD[rows].to(dtype)
        logits_CV, p_CV = logits[: x_CD.shape[0]], wide[: x_CD.shape[0]]
        torch.mm(x_CD, weight.T, out=logits_CV)
        if wide is not logits:
            p_CV.copy_(logits_CV)
        counted_C1 = (targets_M[rows] != ignore_index)[:, None]
        target_C1 = torch.where(counted_C1, targets_M[rows][:, None], 0)
        target_logit_C1 = p_CV.gather(1, target_C1)
        log_p_C1 = target_logit_C1 - _softmax_in_place(p_CV, counted_C1)
        loss -= (log_p_C1 * counted_C1).sum()
        if not need_dx and not need_dw:
            continue
        # p - 1 at the target from its logarithm: subtracted in half precision it would cancel.
        p_CV.scatter_(1, target_C1, torch.expm1(log_p_C1) * counted_C1)
        dlogits_CV = p_CV if wide is logits else logits_CV.copy_(p_CV)
        if need_dx:
            dx_MD[rows] = dlogits_CV @ weight
        if need_dw:
            if total.dtype == dtype:
                total.T.addmm_(x_CD.T, dlogits_CV)
            else:
                total += dlogits_CV.T @ x_CD
    if total is not dw_VD:
        dw_VD.copy_(total)
    return loss, dx_MD, dw_VD


def _softmax_in_place(x_CV: Tensor, keep_C1: Tensor) -> Tensor:
    """Turns logits into probabilities (zeros in rows that are not kept); returns log-sum-exp."""
    # On a CPU a few rows at a time, so that the passes over them run in cache.
    rows = 8 if x_CV.device.type == 'cpu' else x_CV.shape[0]
    lse = []
    for x, keep in zip(x_CV.split(rows), keep_C1.split(rows), strict=True):
        largest = x.amax(dim=-1, keepdim=True)
        total = x.sub_(largest).exp_().sum(dim=-1, keepdim=True)
        x.mul_(keep / total)
        lse.append(largest + total.log())
    return torch.cat(lse)


def _fake_forward(
    x_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    ignore_index: int,
    chunk_size: int,
    dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x_MD.new_empty((), dtype=torch.promote_types(dtype, torch.float32)),
        x_MD.new_empty(x_MD.shape if need_dx else 0),
        weight_VD.new_empty(weight_VD.shape if need_dw else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, ctx.need_dx, ctx.need_dw = inputs
    _, dx_MD, dw_VD = output
    ctx.mark_non_differentiable(dx_MD, dw_VD)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dx_MD, dw_VD)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    dx_MD, dw_VD = ctx.saved_tensors
    # The head's gradient is large: scale it in place, unless a second backward pass may come for it
    # or a compiler traces this one (with tensors of its own types).
    kept = torch._C._autograd._get_current_graph_task_keep_graph() or type(dw_VD) is not Tensor
    scale = torch.mul if kept else Tensor.mul_
    dx = scale(dx_MD, grad) if ctx.need_dx else None
    dw = scale(dw_VD, grad) if ctx.need_dw else None
    return (dx, dw, *(None,) * 6)


def _flops(
    x: Sequence[int],
    weight: Sequence[int],
    targets: Any,
    i: Any,
    c: Any,
    d: Any,
    dx: bool,
    dw: bool,
    **_: Any,
) -> int:
    return (1 + dx + dw) * 2 * x[0] * x[1] * weight[0]


def _register() -> None:
    name = 'asymloop::linear_cross_entropy'
    torch.library.define(
        name,
        '(Tensor x, Tensor weight, Tensor targets, int ignore_index, int chunk_size, '
        'ScalarType dtype, bool need_dx, bool need_dw) -> (Tensor, Tensor, Tensor)',
    )
    torch.library.impl(name, 'default', _forward)
    torch.library.register_fake(name, _fake_forward)
    torch.library.register_autograd(name, _backward, setup_context=_setup_context)
    register_flop_formula(torch.ops.asymloop.linear_cross_entropy)(_flops)


# An exported model carries a copy of this file: the first copy that a process imports registers.
if not hasattr(torch.ops.asymloop, 'linear_cross_entropy'):
    _register()
