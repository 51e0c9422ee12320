# SPDX-License-Identifier: Apache-2.0
"""The chunked loss against torch's own over full float64 logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from asymloop_foundry.models.cross_entropy import linear_cross_entropy

B, N, D, V = 2, 21, 8, 53


def make(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, N), generator=generator)
    labels[0, 3:9] = -100
    return x, weight, labels


def reference(x: Tensor, weight: Tensor, labels: Tensor, reduction: str = 'mean') -> Tensor:
    logits = x.double() @ weight.double().T
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
    )


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def check(x: Tensor, weight: Tensor, labels: Tensor, tolerance: float, **options: object) -> None:
    loss = linear_cross_entropy(x, weight, labels, **options)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = reference(*exact, labels, options.get('reduction', 'mean'))
    assert loss.dtype == (torch.float64 if x.dtype is torch.float64 else torch.float32)
    assert error(loss, expected) < tolerance
    grads = torch.autograd.grad(loss * 3, (x, weight))
    for leaf, grad, exact_grad in zip(
        (x, weight), grads, torch.autograd.grad(expected * 3, exact), strict=True
    ):
        assert grad.dtype == leaf.dtype
        assert error(grad, exact_grad) < tolerance


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('chunk_size', [1, 8, 42, 1000])
@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=['fp64', 'fp32', 'bf16'],
)
def test_loss_and_gradients_equal_full_logits(
    dtype: torch.dtype, tolerance: float, chunk_size: int, reduction: str
) -> None:
    check(*make(dtype), tolerance, chunk_size=chunk_size, reduction=reduction)


def test_gradcheck() -> None:
    x, weight, labels = make(torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, labels, chunk_size=8), (x, weight)
    )


def test_bf16_autocast_gives_full_precision_gradients_close_to_the_exact_ones() -> None:
    with torch.autocast('cpu', dtype=torch.bfloat16):
        check(*make(), 1e-2, chunk_size=8)


def test_bf16_keeps_the_gradient_of_a_nearly_certain_target() -> None:
    x = torch.tensor([[[1.0], [1.0]]], requires_grad=True)
    weight = torch.tensor([[8.0], [0.0]], requires_grad=True)
    labels = torch.zeros(1, 2, dtype=torch.long)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels), weight)
    # p - 1 = -3.4e-4: in bf16, whose neighbours of 1 are 4e-3 apart, 1 - p would be zero.
    assert grad[0].item() == pytest.approx(torch.tensor(8.0).sigmoid().item() - 1, rel=1e-2)


def test_large_logits_do_not_overflow() -> None:
    x, weight, labels = make()
    with torch.no_grad():
        x *= 1e3
    check(x, weight, labels, 1e-5)


def test_rows_without_a_label_get_no_gradient() -> None:
    x, weight, labels = make()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, labels, chunk_size=8), x)
    assert grad[0, 2:8].eq(0).all()  # positions whose next token is ignored
    assert grad[:, -1].eq(0).all()  # and those that have no next token
    assert grad[0, 1].ne(0).any()


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_all_labels_ignored_is_zero_with_zero_gradients(reduction: str) -> None:
    x, weight, labels = make()
    loss = linear_cross_entropy(x, weight, labels.fill_(-100), reduction=reduction)
    assert loss.item() == 0
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, (x, weight)))


def test_another_ignore_index() -> None:
    x, weight, labels = make()
    expected = linear_cross_entropy(x, weight, labels)
    renamed = torch.where(labels == -100, 7777, labels)
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, renamed, ignore_index=7777), expected
    )


@pytest.mark.parametrize('frozen', ['x', 'weight'])
def test_what_needs_no_gradient_costs_none(frozen: str) -> None:
    x, weight, labels = make()
    full = torch.autograd.grad(linear_cross_entropy(x, weight, labels), (x, weight))
    (x if frozen == 'x' else weight).requires_grad_(False)
    with FlopCounterMode(display=False) as flops:
        loss = linear_cross_entropy(x, weight, labels)
    assert flops.get_total_flops() == 2 * 2 * B * N * D * V
    (grad,) = torch.autograd.grad(loss, weight if frozen == 'x' else x)
    torch.testing.assert_close(grad, full[frozen == 'x'])


def test_no_grad_computes_the_loss_alone() -> None:
    x, weight, labels = make()
    expected = linear_cross_entropy(x, weight, labels)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        loss = linear_cross_entropy(x, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    assert flops.get_total_flops() == 2 * B * N * D * V


def test_flops_of_a_training_step_are_three_products() -> None:
    x, weight, labels = (t.to('meta') for t in make())
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with FlopCounterMode(display=False) as flops:
        linear_cross_entropy(x, weight, labels).backward()
    assert flops.get_total_flops() == 3 * 2 * B * N * D * V


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    x, weight, labels = make()
    loss = linear_cross_entropy(x, weight, labels)
    first = torch.autograd.grad(loss * 5, (x, weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss * 5, (x, weight))
    torch.testing.assert_close(second, tuple(kept), rtol=0, atol=0)
    torch.testing.assert_close(first, tuple(kept), rtol=0, atol=0)


def test_gradients_accumulate_over_two_microbatches() -> None:
    x, weight, labels = make()
    for _ in range(2):
        linear_cross_entropy(x, weight, labels).backward()
    once = torch.autograd.grad(linear_cross_entropy(x, weight, labels), weight)[0]
    torch.testing.assert_close(weight.grad, 2 * once)


def test_non_contiguous_inputs() -> None:
    x, weight, labels = make()
    wide = torch.stack((x, x), dim=-1).detach()[..., 0].requires_grad_()
    tall = weight.detach().T.contiguous().T.requires_grad_()
    check(wide, tall, labels.T.contiguous().T, 1e-6, chunk_size=8)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    x, weight, labels = make()
    plain = torch.autograd.grad(linear_cross_entropy(x, weight, labels), (x, weight))
    loss = checkpoint(linear_cross_entropy, x, weight, labels, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), plain)


def test_compiles_without_a_graph_break() -> None:
    x, weight, labels = make()
    compiled = torch.compile(linear_cross_entropy, backend='aot_eager', fullgraph=True)
    loss = compiled(x, weight, labels, chunk_size=8)
    expected = linear_cross_entropy(x, weight, labels, chunk_size=8)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss * 3, (x, weight)), torch.autograd.grad(expected * 3, (x, weight))
    )


@pytest.mark.parametrize('needs', [(True, True), (True, False), (False, False)])
def test_operator_passes_opcheck(needs: tuple[bool, bool]) -> None:
    x, weight, labels = make()
    x = x.detach().flatten(0, 1).requires_grad_(needs[0])
    weight = weight.detach().requires_grad_(needs[1])
    args = (x, weight, labels.flatten(), -100, 8, torch.float32, *needs)
    torch.library.opcheck(torch.ops.asymloop.linear_cross_entropy.default, args)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'reduction': 'none'}, "reduction='none'"),
        ({'chunk_size': 0}, 'chunk_size=0'),
        ({'labels_BN': torch.zeros(B, N - 1, dtype=torch.long)}, 'labels'),
        ({'weight_VD': torch.zeros(V, D + 1)}, 'head'),
    ],
)
def test_misfits_are_refused(change: dict[str, object], message: str) -> None:
    x, weight, labels = make()
    arguments = {'x_BND': x, 'weight_VD': weight, 'labels_BN': labels, **change}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gpu_equals_full_logits(dtype: torch.dtype) -> None:
    x, weight, labels = (t.detach().cuda() for t in make(dtype))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    check(x.requires_grad_(), weight.requires_grad_(), labels, tolerance, chunk_size=8)
