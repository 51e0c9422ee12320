# SPDX-License-Identifier: Apache-2.0
"""The fused elementwise functions against plain formulas, in float64 and under the trainer's modes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asymloop_foundry.models.autocast import to_autocast
from asymloop_foundry.models.fused import RMSNorm, rotate_heads

EPS = 1e-5
B, H, N, D = 2, 3, 5, 8


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + EPS) ** 0.5 * weight


def plain_rotation(x: Tensor, angle: Tensor) -> Tensor:
    """As a product of complex numbers, whose parts are the halves of a head."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def angles(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(B, 1, N, D // 2, dtype=dtype) * 6


def tables(angle: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.cat([f(angle), f(angle)], dim=-1) for f in (torch.cos, torch.sin))


def head_norm(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(D, eps=EPS, dtype=weight.dtype)
    del norm.weight
    norm.weight = weight  # a plain tensor, so that gradcheck reaches it
    return norm


def heads(dtype: torch.dtype = torch.float64) -> Tensor:
    """(B, H, N, d) laid out as (B, N, H, d), as projections make them."""
    return torch.randn(B, N, H, D, dtype=dtype).transpose(1, 2)


def pairs() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    angle = angles()
    weight = torch.randn(D, dtype=torch.float64)
    return {
        'rms_norm': (lambda x, w: head_norm(w)(x), plain_norm, [heads(), weight]),
        'rotation': (
            lambda x: rotate_heads(x, tables(angle)),
            lambda x: plain_rotation(x, angle),
            [heads()],
        ),
        'norm_and_rotation': (
            lambda x, w: rotate_heads(x, tables(angle), head_norm(w)),
            lambda x, w: plain_rotation(plain_norm(x, w), angle),
            [heads(), weight],
        ),
    }


NAMES = ('rms_norm', 'rotation', 'norm_and_rotation')


def gradients(run: Callable[..., Tensor], inputs: list[Tensor], seed: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, seed.to(out.dtype))]


@pytest.mark.parametrize('name', NAMES)
def test_gradients_match_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    run, _, inputs = pairs()[name]
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', NAMES)
def test_value_and_gradients_match_the_plain_formula(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    run, plain, inputs = pairs()[name]
    seed = torch.randn_like(inputs[0])
    own = gradients(run, [x.to(dtype) for x in inputs], seed)
    expected = gradients(plain, [x.to(dtype).double() for x in inputs], seed.to(dtype))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for value, target in zip(own, expected, strict=True):
        assert value.dtype is dtype
        assert (value.double() - target).norm() < tolerance * target.norm()


@pytest.mark.parametrize('name', NAMES)
def test_inference_computes_what_training_does(name: str) -> None:
    torch.manual_seed(0)
    run, _, inputs = pairs()[name]
    with torch.no_grad():
        without = run(*inputs)
    torch.testing.assert_close(without, run(*[x.requires_grad_() for x in inputs]).detach())


def test_incoming_gradient_is_left_alone() -> None:
    torch.manual_seed(0)
    for name, (run, _, inputs) in pairs().items():
        seed = torch.randn_like(inputs[0])
        kept = seed.clone()
        gradients(run, inputs, seed)
        assert torch.equal(seed, kept), name


@pytest.mark.parametrize('name', NAMES)
def test_second_derivatives_are_refused_rather_than_wrong(name: str) -> None:
    run, _, inputs = pairs()[name]
    inputs = [x.requires_grad_() for x in inputs]
    (grad, *_) = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.sum().backward()


@pytest.mark.parametrize('name', NAMES)
def test_checkpointing_recomputes_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    run, _, inputs = pairs()[name]
    seed = torch.randn_like(inputs[0])
    expected = gradients(run, inputs, seed)
    own = gradients(lambda *x: checkpoint(run, *x, use_reentrant=False), inputs, seed)
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_compiler_sees_no_graph_break() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(D, eps=EPS)
    rope = tables(angles(torch.float32))

    def layer(x: Tensor) -> Tensor:
        return rotate_heads(x, rope, norm) * rotate_heads(norm(x), rope)

    x = heads(torch.float32)
    seed = torch.randn_like(x)
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    for own, expected in zip(
        gradients(compiled, [x], seed), gradients(layer, [x], seed), strict=True
    ):
        torch.testing.assert_close(own, expected)


def test_autocast_casts_once_and_leaves_float64_alone() -> None:
    x = torch.randn(3)
    assert to_autocast(x) is x
    with torch.autocast('cpu', torch.bfloat16):
        assert to_autocast(x).dtype is torch.bfloat16
        assert to_autocast(x.double()).dtype is torch.float64
        assert RMSNorm(3)(x).dtype is torch.float32


def test_the_meta_device_has_no_autocast_and_needs_none() -> None:
    x = torch.empty(3, device='meta')
    assert to_autocast(x) is x
