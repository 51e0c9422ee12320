# SPDX-License-Identifier: Apache-2.0
"""A layer's elementwise work in few passes over memory: RMSNorm and rotary heads.

Left to autograd, each of these is five to ten operators whose intermediates are all allocated, and many
of them kept for the backward pass. Here the forward pass keeps its inputs and one number a row, and
both passes work in place. ``torch.compile`` traces these functions without a graph break.

Shapes: B batch, N positions, H heads, d head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ['RMSNorm', 'Rope', 'rotate_heads']

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in at least fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape and the dtype."""
        if not torch.is_grad_enabled():  # decoding: one call from Python rather than eight
            return super().forward(x).to(x.dtype)
        return _RMSNorm.apply(x, self.weight, self.eps)


def rotate_heads(x_BHNd: Tensor, rope: Rope, norm: nn.RMSNorm | None = None) -> Tensor:
    """Normalises each head, if asked, and rotates its pairs (i, i + d/2) by their position's angle.

    Args:
        x_BHNd: heads, in any layout; the result has the same.
        rope: cosines and sines, (B, 1, N, d) each, whose halves over d are the same.
        norm: the QK-norm, over d.
    """
    cos, sin = rope
    if not torch.is_grad_enabled():
        normed = x_BHNd if norm is None else norm(x_BHNd)
        return _turn(_wide(normed), cos, sin).to(x_BHNd.dtype)
    if norm is None:
        return _Rotate.apply(x_BHNd, cos, sin)
    return _NormRotate.apply(x_BHNd, norm.weight, norm.eps, cos, sin)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _copy(x: Tensor) -> Tensor:
    """At least fp32, and a tensor of its own."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _inverse_rms(x: Tensor, eps: float | None) -> Tensor:
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return mean_square.add_(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt_()


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x * inverse * weight`` by x and by the weight; uses up ``grad``."""
    product = grad * x
    slope = (product * weight).sum(-1, keepdim=True)
    slope = slope.mul_(inverse.pow(3)).div_(-x.shape[-1])
    dweight = product.mul_(inverse).flatten(0, -2).sum(0)
    return grad.mul_(weight).mul_(inverse).addcmul_(x, slope), dweight


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``(x1 cos1 - x2 sin2, x2 cos2 + x1 sin1)`` of the halves 1 and 2 over d."""
    (x1, x2), (sin1, sin2) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    out = x * cos
    out1, out2 = out.chunk(2, dim=-1)
    out1.addcmul_(x2, sin2, value=-1)
    out2.addcmul_(x1, sin1)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        wide, scale = _wide(x), _wide(weight)
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = _norm_backward(_copy(grad), _wide(x), _wide(weight), inverse)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHNd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(_wide(x_BHNd), cos, sin).to(x_BHNd.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(_wide(grad), cos, -sin).to(grad.dtype), None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BHNd: Tensor, weight: Tensor, eps: float | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        # The weight goes into the small tables, the row's norm behind the rotation: they commute.
        wide, scale = _wide(x_BHNd), _wide(weight)
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(x_BHNd, weight, inverse, cos, sin)
        return _turn(wide, cos * scale, sin * scale).mul_(inverse).to(x_BHNd.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, inverse, cos, sin = ctx.saved_tensors
        back = _turn(_wide(grad), cos, -sin)  # the inverse rotation is its transpose
        dx, dweight = _norm_backward(back, _wide(x), _wide(weight), inverse)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None
