# SPDX-License-Identifier: Apache-2.0
"""The joint operator against the literal softmax over 2N keys, in float64.

The CUDA kernels cannot run here, but everything around them can: ``emulated_cuda`` installs CPU
implementations of the very operators that the CUDA paths call, which keep those kernels' conventions
(layout, padding, what comes back as None) and refuse what the kernels would misread.
"""

import inspect
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from asymloop_foundry.models import joint_attention as module
from asymloop_foundry.models.configuration_asymloop import ATTENTION_BACKENDS
from asymloop_foundry.models.joint_attention import BACKENDS, choose_backend, joint_attention
from asymloop_foundry.models.reference import reference_joint_attention

aten = torch.ops.aten
CPU = torch.device('cpu')
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def make(
    n: int = 33,
    width: int = 16,
    heads: int = 4,
    kv_heads: int = 4,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """q, k_global, v_global, k_local, v_local as a projection leaves them: strided (B, N, H, d)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, n, h, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for h in (heads, kv_heads, kv_heads, kv_heads, kv_heads)
    ]


def as_float64(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors]


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def check(tensors: list[Tensor | None], tolerance: float, **options: object) -> None:
    """Output and every gradient of the operator against the float64 reference."""
    exact = as_float64(tensors)
    out = joint_attention(*tensors, **options)
    expected = reference_joint_attention(*exact)
    assert out.dtype == tensors[0].dtype
    assert out.transpose(1, 2).is_contiguous()
    assert error(out, expected) < tolerance
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    leaves = [x for x in tensors if x is not None]
    grads = torch.autograd.grad(out, leaves, upstream)
    exact_grads = torch.autograd.grad(
        expected, [x for x in exact if x is not None], upstream.double()
    )
    for x, grad, exact_grad in zip(leaves, grads, exact_grads, strict=True):
        assert grad.dtype == x.dtype
        assert grad.shape == x.shape
        scale = exact_grad.norm().item()
        if scale > 1e-6:
            assert error(grad, exact_grad) < tolerance
        else:  # one position alone: the scores of a single source cannot matter
            assert grad.double().norm().item() < 1e-5


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['fp32', 'bf16'])
@pytest.mark.parametrize(
    ('n', 'width'),
    [(1, 64), (2, 128), (31, 80), (33, 64), (257, 128), (300, 80), (1000, 64)],
)
def test_output_and_five_gradients_equal_the_float64_reference(
    n: int, width: int, dtype: torch.dtype
) -> None:
    heads = 1 if n >= 1000 else 2
    check(make(n, width, heads, heads, batch=1, dtype=dtype), TOLERANCE[dtype])


def test_longest_sequence_equals_the_float64_reference() -> None:
    check(make(2048, 128, 1, 1, batch=1), TOLERANCE[torch.float32])


def test_bf16_is_about_as_exact_as_attention_with_a_mask() -> None:
    tensors = make(257, 64, 2, 2, batch=1, dtype=torch.bfloat16)
    exact = as_float64(tensors)
    q, kg, vg, kl, vl = tensors
    causal = torch.ones(257, 257, dtype=torch.bool).tril()
    masked = torch.nn.functional.scaled_dot_product_attention(
        q, torch.cat((kg, kl), 2), torch.cat((vg, vl), 2), attn_mask=torch.cat((causal, causal), 1)
    )
    joint, expected = joint_attention(*tensors), reference_joint_attention(*exact)
    assert error(joint, expected) < 1.5 * error(masked, expected)
    upstream = torch.randn(joint.shape, dtype=torch.bfloat16)
    ours = torch.autograd.grad(joint, tensors, upstream)
    theirs = torch.autograd.grad(masked, tensors, upstream)
    truth = torch.autograd.grad(expected, exact, upstream.double())
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert error(a, c) < 1.5 * error(b, c)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16], ids=['fp64', 'fp16'])
def test_other_dtypes_equal_the_float64_reference(dtype: torch.dtype) -> None:
    check(make(65, 64, dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize('loud', ['global', 'local'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['fp32', 'bf16'])
def test_a_source_fifty_times_the_other_does_not_spoil_the_merge(
    loud: str, dtype: torch.dtype
) -> None:
    tensors = make(130, 64, 2, 2, dtype=dtype)
    with torch.no_grad():
        for x in tensors[1:3] if loud == 'global' else tensors[3:5]:
            x *= 50
    exact = as_float64(tensors)
    out, expected = joint_attention(*tensors), reference_joint_attention(*exact)
    # Scores reach 400, whose own rounding in fp32 (400 * 2 ** -24) is the error of a probability.
    tolerance = {torch.float32: 5e-5, torch.bfloat16: 3e-2}[dtype]
    assert error(out, expected) < tolerance
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    exact_grads = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    # One key takes nearly all: the gradients of the quiet source are differences of large numbers,
    # so they are held against the largest gradient of their kind.
    for i, j in ((0, 0), (1, 3), (2, 4), (3, 1), (4, 2)):
        scale = max(exact_grads[i].norm(), exact_grads[j].norm())
        assert (grads[i].double() - exact_grads[i]).norm() / scale < tolerance


@pytest.mark.parametrize('absent', ['global', 'local'])
def test_one_source_alone_is_plain_causal_attention(absent: str) -> None:
    tensors: list[Tensor | None] = list(make())
    for i in (1, 2) if absent == 'global' else (3, 4):
        tensors[i] = None
    check(tensors, TOLERANCE[torch.float32])


@pytest.mark.parametrize('kv_heads', [1, 2])
def test_grouped_queries_equal_the_float64_reference(kv_heads: int) -> None:
    check(make(37, 16, 4, kv_heads), TOLERANCE[torch.float32])


def test_non_contiguous_inputs_and_upstream_gradient() -> None:
    wide = [torch.randn(2, 4, 16, 33, requires_grad=True) for _ in range(5)]
    tensors = [x.transpose(2, 3) for x in wide]  # last stride is 33
    out = joint_attention(*tensors)
    exact = as_float64(tensors)
    expected = reference_joint_attention(*exact)
    assert error(out, expected) < TOLERANCE[torch.float32]
    upstream = torch.randn(2, 4, 16, 33).transpose(2, 3)
    grads = torch.autograd.grad(out, wide, upstream, retain_graph=True)
    exact_grads = torch.autograd.grad(expected, exact, upstream.double(), retain_graph=True)
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        assert error(grad.transpose(2, 3), exact_grad) < TOLERANCE[torch.float32]
    expanded = torch.autograd.grad(out.sum(), wide)
    exact_grads = torch.autograd.grad(expected.sum(), exact)
    assert error(expanded[2].transpose(2, 3), exact_grads[2]) < TOLERANCE[torch.float32]


def test_views_of_one_fused_projection() -> None:
    fused = torch.randn(2, 33, 5 * 4 * 16, requires_grad=True)
    tensors = [x.unflatten(-1, (4, 16)).transpose(1, 2) for x in fused.chunk(5, dim=-1)]
    exact = as_float64(tensors)
    (grad,) = torch.autograd.grad(joint_attention(*tensors).square().sum(), fused)
    grads = torch.autograd.grad(reference_joint_attention(*exact).square().sum(), exact)
    expected = torch.cat([x.transpose(1, 2).flatten(2) for x in grads], dim=-1)
    assert error(grad, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize('frozen', [(0,), (1, 2), (0, 1, 3), (2, 4)])
def test_frozen_inputs_leave_the_other_gradients_alone(frozen: tuple[int, ...]) -> None:
    tensors = make()
    wanted = [i for i in range(5) if i not in frozen]
    full = torch.autograd.grad(joint_attention(*tensors).sum(), tensors)
    for i in frozen:
        tensors[i].requires_grad_(False)
    grads = torch.autograd.grad(joint_attention(*tensors).sum(), [tensors[i] for i in wanted])
    for i, grad in zip(wanted, grads, strict=True):
        torch.testing.assert_close(grad, full[i], rtol=0, atol=0)


@pytest.mark.parametrize('kv_heads', [1, 2])
def test_gradcheck(kv_heads: int) -> None:
    tensors = make(5, 4, 2, kv_heads, batch=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(joint_attention, tensors)


def test_second_derivatives_are_refused_not_wrong() -> None:
    tensors = make(5, 4)
    (grad,) = torch.autograd.grad(joint_attention(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_the_reference_back_end_can_be_asked_for() -> None:
    check(make(), TOLERANCE[torch.float32], backend='reference')


# Decoding and masks


@pytest.mark.parametrize('backend', ['auto', 'reference'])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_a_single_query_sees_every_key_of_both_sources(kv_heads: int, backend: str) -> None:
    q, kg, vg, kl, vl = make(19, 16, 4, kv_heads)
    kl, vl = kl[:, :, :12], vl[:, :, :12]
    out = joint_attention(q[:, :, -1:], kg, vg, kl, vl, backend=backend)
    k, v = (
        torch.cat(x, dim=2).double().repeat_interleave(4 // kv_heads, 1)
        for x in ((kg, kl), (vg, vl))
    )
    scores = q[:, :, -1:].double() @ k.transpose(-2, -1) / 4
    assert error(out, scores.softmax(dim=-1) @ v) < TOLERANCE[torch.float32]


def test_decoding_one_by_one_equals_the_causal_pass() -> None:
    with torch.no_grad():
        q, kg, vg, kl, vl = make(9)
        full = joint_attention(q, kg, vg, kl, vl)
        for i in range(9):
            past = [x[:, :, : i + 1] for x in (kg, vg, kl, vl)]
            torch.testing.assert_close(
                joint_attention(q[:, :, i : i + 1], *past), full[:, :, i : i + 1]
            )


@pytest.mark.parametrize('kv_heads', [4, 2])
def test_a_mask_applies_to_each_source_and_blind_queries_get_zeros(kv_heads: int) -> None:
    tensors = make(7, 8, 4, kv_heads)
    mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7).clone()
    mask[0, :, :, :3] = False  # left padding: the first three queries of row 0 see nothing
    out = joint_attention(*tensors, mask=mask)
    groups = 4 // kv_heads
    exact = as_float64(tensors)
    k, v = (
        torch.cat(x, dim=2).repeat_interleave(groups, 1)
        for x in ((exact[1], exact[3]), (exact[2], exact[4]))
    )
    scores = exact[0] @ k.transpose(-2, -1) / 8**0.5
    weights = scores.masked_fill(~torch.cat((mask, mask), -1), float('-inf')).softmax(-1)
    expected = weights.nan_to_num(0.0) @ v
    assert error(out, expected) < TOLERANCE[torch.float32]
    assert out[0, :, :3].eq(0).all()
    grads = torch.autograd.grad(out.square().sum(), tensors)
    assert all(grad.isfinite().all() for grad in grads)
    seen = torch.autograd.grad(expected[:, :, 3:].square().sum(), exact[1])[0]
    rest = torch.autograd.grad(
        joint_attention(*tensors, mask=mask)[:, :, 3:].square().sum(), tensors[1]
    )[0]
    assert error(rest[1], seen[1]) < TOLERANCE[torch.float32]


def test_a_chunk_of_queries_against_a_longer_past() -> None:
    q, kg, vg, kl, vl = make(10)
    full = joint_attention(q, kg, vg, kl, vl)
    mask = torch.ones(10, 10, dtype=torch.bool).tril()[6:]
    chunk = joint_attention(q[:, :, 6:], kg, vg, kl, vl, mask=mask)
    torch.testing.assert_close(chunk, full[:, :, 6:])


# Refusals: the raw kernels would return garbage


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda t: t.__setitem__(1, t[1][:, :3]), 'keys .* and values'),
        (lambda t: t.__setitem__(slice(1, 3), [t[1][:, :3], t[2][:, :3]]), 'query heads'),
        (lambda t: t.__setitem__(slice(1, 3), [t[1][:, :2], t[2][:, :2]]), 'same in both sources'),
        (lambda t: t.__setitem__(slice(3, 5), [t[3].double(), t[4].double()]), 'one dtype'),
        (lambda t: t.__setitem__(0, t[0].bfloat16()), 'one dtype'),
        (lambda t: t.__setitem__(slice(1, 3), [t[1].to('meta'), t[2].to('meta')]), 'one device'),
        (
            lambda t: t.__setitem__(slice(1, 3), [t[1][..., :8], t[2][..., :8]]),
            'do not fit queries',
        ),
        (lambda t: t.__setitem__(slice(1, 3), [t[1][:1], t[2][:1]]), 'do not fit queries'),
        (lambda t: t.__setitem__(slice(1, 3), [t[1][:, :, :9], t[2][:, :, :9]]), 'need a mask'),
        (lambda t: t.__setitem__(slice(1, 3), [t[1][:, :, :0], t[2][:, :, :0]]), 'at least 1'),
        (lambda t: t.__setitem__(0, t[0][:, :, :9]), 'need a mask'),
        (lambda t: t.__setitem__(0, t[0].flatten(0, 1)), r'\(B, H, N, d\)'),
        (lambda t: t.__setitem__(2, None), 'k_global and v_global'),
        (lambda t: t.__setitem__(slice(1, 5), [None] * 4), 'got neither'),
    ],
)
def test_misfits_are_refused(change: object, message: str) -> None:
    tensors: list[Tensor | None] = list(make())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        joint_attention(*tensors)


@pytest.mark.parametrize(
    ('mask', 'message'),
    [
        (torch.ones(33, 33), 'must be bool'),
        (torch.ones(33, 32, dtype=torch.bool), 'broadcastable'),
    ],
)
def test_wrong_masks_are_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joint_attention(*make(), mask=mask)


def test_the_configuration_offers_exactly_these_back_ends() -> None:
    assert BACKENDS == ATTENTION_BACKENDS


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attn_backend='flash' must be one of auto, cpu_flash"):
        joint_attention(*make(), backend='flash')


@pytest.mark.parametrize('backend', ['cuda_flash', 'flash_attn', 'efficient'])
def test_a_cuda_back_end_on_the_cpu_says_what_is_missing(backend: str) -> None:
    with pytest.raises(ValueError, match=rf"attn_backend='{backend}' cannot run here: .*install"):
        joint_attention(*make(), backend=backend)


def test_cpu_flash_is_not_for_other_devices() -> None:
    with pytest.raises(ValueError, match=r"attn_backend='cpu_flash' cannot run here: .*auto"):
        choose_backend('cpu_flash', torch.device('cuda'), torch.float32, 64)


@pytest.mark.parametrize(
    ('dtype', 'width', 'ampere', 'chosen'),
    [
        (torch.bfloat16, 64, True, 'cuda_flash'),
        (torch.float16, 256, True, 'cuda_flash'),
        (torch.float32, 64, True, 'efficient'),
        (torch.bfloat16, 64, False, 'efficient'),
        (torch.bfloat16, 264, True, 'efficient'),
        (torch.float32, 20, True, 'efficient'),
        (torch.bfloat16, 20, True, 'reference'),
        (torch.float64, 64, True, 'reference'),
    ],
)
def test_auto_on_cuda_follows_dtype_width_and_capability(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, ampere: bool, chosen: str
) -> None:
    monkeypatch.setattr(module, '_has_ampere', lambda index: ampere)
    monkeypatch.setattr(torch.backends.cuda, 'is_flash_attention_available', lambda: True)
    assert choose_backend('auto', torch.device('cuda'), dtype, width) == chosen


@pytest.mark.parametrize(
    ('backend', 'dtype', 'width', 'message'),
    [
        ('flash_attn', torch.bfloat16, 64, 'pip install "flash-attn>=2.7,<3"'),
        ('cuda_flash', torch.float32, 64, 'amp_bf16'),
        ('cuda_flash', torch.bfloat16, 60, 'multiple of 8'),
        ('efficient', torch.float64, 64, 'attn_backend: reference'),
        ('efficient', torch.float32, 62, 'n_heads'),
        ('cuda_flash', torch.bfloat16, 64, 'official CUDA build'),
    ],
)
def test_an_unavailable_cuda_back_end_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, width: int, message: str
) -> None:
    monkeypatch.setattr(module, '_has_ampere', lambda index: True)
    monkeypatch.setattr(module, '_has_flash_attn', lambda: False)
    monkeypatch.setattr(torch.backends.cuda, 'is_flash_attention_available', lambda: False)
    with pytest.raises(ValueError, match='cannot run here') as caught:
        choose_backend(backend, torch.device('cuda'), dtype, width)
    assert f'attn_backend={backend!r}' in str(caught.value)
    assert message in str(caught.value)


def test_the_reference_takes_over_where_no_kernel_is_known() -> None:
    assert choose_backend('auto', torch.device('mps'), torch.float32, 64) == 'reference'


# The operator as torch's machinery sees it


@pytest.mark.parametrize('sources', [1, 2])
def test_operator_passes_opcheck(sources: int) -> None:
    q, kg, vg, kl, vl = make(9, 8)
    second = (kl, vl) if sources == 2 else (None, None)
    torch.library.opcheck(
        torch.ops.asymloop.joint_attention.default, (q, kg, vg, *second, True, 'cpu_flash')
    )


@pytest.mark.parametrize('kv_heads', [4, 2])
def test_compiles_without_a_graph_break(kv_heads: int) -> None:
    tensors = make(17, 8, 4, kv_heads)
    compiled = torch.compile(joint_attention, backend='aot_eager', fullgraph=True)
    out, expected = compiled(*tensors), joint_attention(*tensors)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), tensors))


def test_compiles_under_autocast_with_mixed_dtypes() -> None:
    tensors = make(17, 8)
    tensors[4] = tensors[4].bfloat16()
    compiled = torch.compile(joint_attention, backend='aot_eager', fullgraph=True)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = compiled(*tensors)
    assert out.dtype == torch.bfloat16
    assert error(out, reference_joint_attention(*as_float64(tensors))) < 1e-2


@pytest.mark.parametrize('sources', [1, 2])
@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_flops_are_those_of_the_products(sources: int, device: str) -> None:
    n, width, heads, batch = 17, 8, 4, 2
    tensors = [x.detach().to(device).requires_grad_() for x in make(n, width, heads, 2, batch)]
    if sources == 1:
        tensors[3:] = [None, None]
    product = 2 * batch * heads * n * n * width * sources
    with FlopCounterMode(display=False) as forward:
        out = joint_attention(*tensors)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * product
    assert backward.get_total_flops() == 5 * product


def test_checkpointing_recomputes_the_same_gradients() -> None:
    tensors = make()
    plain = torch.autograd.grad(joint_attention(*tensors).square().sum(), tensors)
    out = checkpoint(lambda *t: joint_attention(*t).square().sum(), *tensors, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out, tensors), plain, rtol=0, atol=0)


def test_saves_nothing_quadratic() -> None:
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    n = 256
    tensors = make(n, 16, 2, 2, batch=1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = joint_attention(*tensors)
    rows = sum(x.untyped_storage().nbytes() for x in (*tensors, out))
    assert sum(saved.values()) == rows + 2 * n * 4  # and the joint log-sum-exp


def test_a_second_copy_of_the_file_shares_the_operator() -> None:
    copy = types.ModuleType('exported.joint_attention')
    copy.__package__ = 'asymloop_foundry.models'
    source = inspect.getsource(module)
    exec(compile(source, module.__file__, 'exec'), copy.__dict__)
    tensors = make()
    torch.testing.assert_close(copy.joint_attention(*tensors), joint_attention(*tensors))


# The CUDA paths, emulated


def _joint_probabilities(
    q: Tensor, k: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, float]:
    scale = q.shape[-1] ** -0.5
    scores = q.double() @ k.double().transpose(-2, -1) * scale
    if causal:
        assert q.shape[2] == k.shape[2]
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float('-inf')
        )
    return scores, (scores - lse.double()[..., None]).exp(), scale


def emulated_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores, _, _ = _joint_probabilities(q, k, torch.zeros(q.shape[:3]), causal)
    lse = scores.logsumexp(dim=-1)
    return (scores.softmax(dim=-1) @ v.double()).to(q.dtype), lse.float()


def emulated_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    _, p, scale = _joint_probabilities(q, k, lse, causal)
    dp = do.double() @ v.double().transpose(-2, -1)
    ds = p * (dp - (do.double() * out.double()).sum(-1, keepdim=True)) * scale
    fold = lambda x: x.unflatten(1, (kv_heads, groups)).sum(2)  # noqa: E731
    dk, dv = fold(ds.transpose(-2, -1) @ q.double()), fold(p.transpose(-2, -1) @ do.double())
    return tuple(x.to(q.dtype) for x in (ds @ k.double(), dk, dv))


def assert_readable(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1


def strided_like_a_kernel(x_BHNd: Tensor) -> Tensor:
    return x_BHNd.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture(scope='module')
def emulated_cuda() -> Iterator[None]:
    """CPU implementations of the operators that the CUDA paths call, and a flash_attn package."""

    def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        assert dropout_p == 0
        assert scale is None
        assert_readable(q, k, v)
        out, lse = emulated_forward(q, k, v, is_causal)
        state = torch.zeros(2, dtype=torch.uint64)
        none = torch.empty(0)
        unused = torch.empty((), dtype=torch.uint64)
        return (
            strided_like_a_kernel(out),
            lse,
            none,
            none,
            q.shape[2],
            k.shape[2],
            state,
            unused,
            none,
        )

    def flash_backward(
        do,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        seed,
        offset,
        *,
        scale=None,
    ):
        assert cum_q is None
        assert cum_k is None
        assert (max_q, max_k, dropout_p, scale) == (q.shape[2], k.shape[2], 0, None)
        assert lse.is_contiguous()
        assert lse.shape == q.shape[:3]
        assert seed.dtype == offset.dtype == torch.uint64
        assert_readable(do, q, k, v, out)
        return emulated_backward(do, q, k, v, out, lse, is_causal)

    def efficient(
        q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):
        assert attn_bias is None
        assert compute_log_sumexp
        assert dropout_p == 0
        assert_readable(q, k, v)
        assert k.shape[1] == q.shape[1]
        out, lse = emulated_forward(q, k, v, is_causal)
        padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float('inf'))
        padded[..., : lse.shape[2]] = lse
        seed = torch.empty((), dtype=torch.int64)
        return strided_like_a_kernel(out), padded, seed, seed

    def efficient_backward(
        do,
        q,
        k,
        v,
        attn_bias,
        out,
        lse,
        seed,
        offset,
        dropout_p,
        grad_input_mask,
        is_causal=False,
        *,
        scale=None,
    ):
        assert attn_bias is None
        assert dropout_p == 0
        assert list(grad_input_mask) == [True, True, True, False]
        assert lse.is_contiguous()
        assert lse.shape[2] % 32 == 0
        assert lse[..., q.shape[2] :].eq(float('inf')).all()
        assert k.shape[1] == q.shape[1]
        assert_readable(do, q, k, v, out)
        dq, dk, dv = emulated_backward(do, q, k, v, out, lse[..., : q.shape[2]], is_causal)
        return dq, dk, dv, torch.empty(0)

    library = torch.library.Library('aten', 'IMPL')
    library.impl('_scaled_dot_product_flash_attention', flash, 'CPU')
    library.impl('_scaled_dot_product_flash_attention_backward', flash_backward, 'CPU')
    library.impl('_scaled_dot_product_efficient_attention', efficient, 'CPU')
    library.impl('_scaled_dot_product_efficient_attention_backward', efficient_backward, 'CPU')

    def package_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0, 0, None, False)
        assert (window_size_left, window_size_right) == (-1, -1)
        assert softmax_scale == q.shape[-1] ** -0.5
        out, lse = emulated_forward(*(x.transpose(1, 2) for x in (q, k, v)), causal)
        return (
            out.transpose(1, 2).contiguous(),
            lse,
            torch.empty(0),
            torch.empty(2, dtype=torch.int64),
        )

    def package_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, rng_state) == (0, 0, None, None)
        assert softmax_lse.is_contiguous()
        grads = emulated_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)), softmax_lse, causal
        )
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            assert target.is_contiguous()
            target.copy_(grad.transpose(1, 2))
        return torch.empty(0)

    package = types.ModuleType('flash_attn')
    interface = types.ModuleType('flash_attn.flash_attn_interface')
    package.__spec__ = ModuleSpec('flash_attn', None)
    package.flash_attn_interface = interface
    interface._flash_attn_forward = package_forward
    interface._flash_attn_backward = package_backward
    sys.modules |= {'flash_attn': package, 'flash_attn.flash_attn_interface': interface}
    yield
    library._destroy()
    del sys.modules['flash_attn'], sys.modules['flash_attn.flash_attn_interface']


@pytest.fixture
def on_cuda(emulated_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_obstacle', lambda *_: None)


@pytest.mark.usefixtures('on_cuda')
@pytest.mark.parametrize('backend', ['cuda_flash', 'flash_attn', 'efficient'])
class TestCudaBookkeeping:
    @pytest.mark.parametrize('n', [1, 32, 45])
    @pytest.mark.parametrize('kv_heads', [4, 2])
    def test_output_and_gradients(self, backend: str, n: int, kv_heads: int) -> None:
        check(make(n, 16, 4, kv_heads), TOLERANCE[torch.float32], backend=backend)

    def test_one_source(self, backend: str) -> None:
        check([*make(45)[:3], None, None], TOLERANCE[torch.float32], backend=backend)

    def test_bf16(self, backend: str) -> None:
        check(make(45, dtype=torch.bfloat16), TOLERANCE[torch.bfloat16], backend=backend)

    def test_awkward_strides(self, backend: str) -> None:
        tensors = [torch.randn(2, 4, 16, 33).transpose(2, 3).requires_grad_() for _ in range(5)]
        check(tensors, TOLERANCE[torch.float32], backend=backend)

    def test_single_query(self, backend: str) -> None:
        q, kg, vg, kl, vl = make(19, 16, 4, 2)
        args = (q[:, :, -1:], kg, vg, kl[:, :, :12], vl[:, :, :12])
        torch.testing.assert_close(
            joint_attention(*args, backend=backend), joint_attention(*args, backend='reference')
        )

    def test_operator_passes_opcheck(self, backend: str) -> None:
        torch.library.opcheck(
            torch.ops.asymloop.joint_attention.default, (*make(45, 8), True, backend)
        )


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('n', [32, 45])
@pytest.mark.parametrize('causal', [True, False])
def test_cuda_calls_fit_the_schemas_of_this_torch(dtype: torch.dtype, n: int, causal: bool) -> None:
    """Fake CUDA tensors run every aten call of the CUDA paths through torch's own shape functions."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k, v, do = (
            torch.empty(2, n, 4, 64, dtype=dtype, device='cuda').transpose(1, 2) for _ in range(4)
        )
        names = ['efficient'] + (['cuda_flash'] if dtype is not torch.float32 else [])
        for name in names:
            kernel = module._KERNELS[name]
            out, lse = kernel.forward(q, k, v, causal)
            fake_out, fake_lse = module._fake_forward(q, k, v, k, v, causal, name)
            assert (out.shape, out.stride(), out.dtype) == (q.shape, fake_out.stride(), dtype)
            assert (lse.shape, lse.dtype) == (fake_lse.shape, torch.float32)
            grads = kernel.backward(do, q, k, v, out, lse, causal)
            assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize('kv_heads', [4, 2])
@pytest.mark.parametrize(('n', 'width'), [(1, 64), (33, 80), (257, 64), (1000, 128)])
@pytest.mark.parametrize(
    ('backend', 'dtype'),
    [
        ('cuda_flash', torch.bfloat16),
        ('cuda_flash', torch.float16),
        ('efficient', torch.float32),
        ('efficient', torch.bfloat16),
        ('flash_attn', torch.bfloat16),
    ],
)
def test_gpu_kernels_equal_the_float64_reference(
    backend: str, dtype: torch.dtype, n: int, width: int, kv_heads: int
) -> None:
    if backend == 'flash_attn':
        pytest.importorskip('flash_attn')
    tensors = [x.detach().cuda().requires_grad_() for x in make(n, width, 4, kv_heads, dtype=dtype)]
    exact = as_float64(tensors)
    out, expected = joint_attention(*tensors, backend=backend), reference_joint_attention(*exact)
    tolerance = 1e-4 if dtype is torch.float32 else TOLERANCE[dtype]
    assert error(out, expected) < tolerance
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, upstream)
    for grad, exact_grad in zip(
        grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True
    ):
        if exact_grad.norm() > 1e-6:
            assert error(grad, exact_grad) < tolerance
