# SPDX-License-Identifier: Apache-2.0
"""Attention over two sources of keys under one softmax, without a mask (paper, section 3.2).

Query i of a decoder layer sees positions j <= i of the Global keys and of the Local keys. Their
softmax splits exactly: with s a source, o_s its own causal attention and l_s the log-sum-exp of its
scores,

    l = log(exp(l_global) + exp(l_local)),    out = sum_s exp(l_s - l) o_s,

so that two causal flash calls and one merge replace a call over 2N keys with a mask, which would
forgo the flash kernel's causal skip. The backward pass needs no merge: a flash kernel rebuilds its
probabilities as exp(score - l), so each source's flash backward, given the *joint* output and the
*joint* log-sum-exp, returns its share of the joint gradients. Differentiating through the merge
instead would be silently wrong: the kernels' log-sum-exp carries no gradient.

The operator is registered with ``torch.library``: ``torch.compile`` traces it without a graph break,
``FlopCounterMode`` counts it and activation checkpointing recomputes it.

Shapes: B batch, N queries, M keys of one source, H query heads, h key and value heads, d head width,
P the rows of a log-sum-exp, which some kernels pad beyond N.
"""

import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .autocast import autocast_dtype
from .reference import reference_joint_attention

__all__ = ['BACKENDS', 'choose_backend', 'joint_attention']

BACKENDS = ('auto', 'cpu_flash', 'cuda_flash', 'flash_attn', 'efficient', 'reference')

_FLASH_ATTN_VERSION = (2, 7)
_HALF = (torch.float16, torch.bfloat16)


def joint_attention(
    q_BHNd: Tensor,
    k_global_BhMd: Tensor | None,
    v_global_BhMd: Tensor | None,
    k_local_BhMd: Tensor | None,
    v_local_BhMd: Tensor | None,
    *,
    mask: Tensor | None = None,
    backend: str = 'auto',
) -> Tensor:
    """One softmax over the keys of both sources (paper, section 3.2).

    Without a mask, N queries against N keys are causal in each source (training, a full forward
    pass), and one query sees every key (decoding; the sources may then differ in length). Under
    autocast the inputs are cast to its dtype, as those of ``scaled_dot_product_attention`` are.

    Args:
        q_BHNd: queries.
        k_global_BhMd: keys made from the encoder's output, or ``None`` for Local only.
        v_global_BhMd: values beside them.
        k_local_BhMd: keys made from the decoder's state, or ``None`` for Global only.
        v_local_BhMd: values beside them.
        mask: bool, broadcastable to (B, 1, N, M), true where a query sees a key; it applies to each
            source alike (padding, chunked prefill). A query that sees no key gets zeros.
        backend: ``auto``, or one of ``BACKENDS``.

    Returns:
        (B, H, N, d), laid out in memory as (B, N, H, d).

    Raises:
        ValueError: shapes, head counts, dtypes or devices do not fit together (the raw kernels would
            return garbage), or the back end is not available here.
    """
    sources = _sources(k_global_BhMd, v_global_BhMd, k_local_BhMd, v_local_BhMd)
    q, sources = _autocast(q_BHNd, sources)
    _check_tensors(q, sources)
    if mask is not None:
        return _masked_attention(q, sources, mask)
    n, lengths = q.shape[2], {k.shape[2] for k, _ in sources}
    if n != 1 and lengths != {n}:
        raise ValueError(
            f'{n} queries against {sorted(lengths)} keys need a mask that says which keys each '
            'query sees; without one, queries and keys must be equally many, or the query single.'
        )
    chosen = choose_backend(backend, q.device, q.dtype, q.shape[3])
    if n == 1:
        return _single_query(q, sources, chosen)
    return _attend(q, sources, True, chosen)


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, d_head: int) -> str:
    """The kernel that will run: the one place where it is chosen.

    ``auto`` takes the first that applies: ``cpu_flash`` on a CPU; ``cuda_flash``, then ``efficient``
    (fp32, head widths that are no multiple of 8) on a GPU; ``reference`` everywhere else.
    ``flash_attn`` runs the same kernel as ``cuda_flash`` from its own package, so it is never taken
    unasked.

    Args:
        backend: one of ``BACKENDS``.
        device: of the tensors.
        dtype: of the tensors.
        d_head: d.

    Returns:
        A name other than ``auto``.

    Raises:
        ValueError: the back end is unknown, or cannot run here; the message says what it needs.
    """
    if backend not in BACKENDS:
        raise ValueError(f'attn_backend={backend!r} must be one of {", ".join(BACKENDS)}.')
    if device.type == 'meta':  # nothing runs there: shapes and FLOPs are the same for all of them
        return 'cpu_flash' if backend == 'auto' else backend
    if backend == 'auto':
        candidates = {'cpu': ('cpu_flash',), 'cuda': ('cuda_flash', 'efficient')}
        for candidate in candidates.get(device.type, ()):
            if _obstacle(candidate, device, dtype, d_head) is None:
                return candidate
        return 'reference'
    obstacle = _obstacle(backend, device, dtype, d_head)
    if obstacle is not None:
        raise ValueError(f'attn_backend={backend!r} cannot run here: {obstacle}')
    return backend


def _obstacle(backend: str, device: torch.device, dtype: torch.dtype, d_head: int) -> str | None:
    """What keeps a back end from running on these tensors, and the remedy; ``None`` if nothing."""
    if backend == 'reference':
        return None
    if backend == 'cpu_flash':
        if device.type != 'cpu':
            return f'it needs tensors on the CPU, got {device.type}; use attn_backend: auto.'
        if dtype not in (*_HALF, torch.float32, torch.float64):
            return f'it needs a floating dtype, got {dtype}.'
        return None
    if device.type != 'cuda':
        return (
            f'it needs tensors on a CUDA device, got {device.type}; install a CUDA build of torch '
            'and a driver, or use attn_backend: auto.'
        )
    multiple = 8 if dtype in _HALF else 4
    if backend == 'efficient':
        if dtype not in (*_HALF, torch.float32):
            return f'it needs fp32, fp16 or bf16, got {dtype}; use attn_backend: reference.'
        if d_head % multiple:
            return (
                f'it needs a head width that is a multiple of {multiple} in {dtype}, got {d_head}; '
                'change n_heads, or use attn_backend: reference.'
            )
        return None
    if dtype not in _HALF:
        return f'flash kernels need fp16 or bf16, got {dtype}; use amp_bf16, or attn_backend: auto.'
    if d_head % 8 or d_head > 256:
        return (
            f'flash kernels need a head width that is a multiple of 8 and at most 256, got {d_head}; '
            'change n_heads, or use attn_backend: auto.'
        )
    if not _has_ampere(device.index):
        return 'flash kernels need compute capability 8.0 or more; use attn_backend: auto.'
    if backend == 'cuda_flash' and not torch.backends.cuda.is_flash_attention_available():
        return 'this torch was built without flash attention; install an official CUDA build.'
    if backend == 'flash_attn' and not _has_flash_attn():
        return (
            f'the package flash-attn, at least {_FLASH_ATTN_VERSION[0]}.{_FLASH_ATTN_VERSION[1]} and '
            'below 3, is not installed; run: pip install "flash-attn>=2.7,<3" '
            '--no-build-isolation, or use attn_backend: cuda_flash, which is the same kernel.'
        )
    return None


@torch.compiler.assume_constant_result
def _has_ampere(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


@torch.compiler.assume_constant_result
def _has_flash_attn() -> bool:
    if importlib.util.find_spec('flash_attn') is None:
        return False
    version = importlib.metadata.version('flash_attn').split('.')
    return _FLASH_ATTN_VERSION <= (int(version[0]), int(version[1])) < (3, 0)


# Checks


def _sources(
    k_global: Tensor | None, v_global: Tensor | None, k_local: Tensor | None, v_local: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    sources = []
    for name, k, v in (('global', k_global, v_global), ('local', k_local, v_local)):
        if k is not None and v is not None:
            sources.append((k, v))
        elif k is not None or v is not None:
            raise ValueError(f'k_{name} and v_{name} must be given together, or both be None.')
    if not sources:
        raise ValueError('joint_attention needs Global or Local keys and values, got neither.')
    return sources


def _autocast(
    q: Tensor, sources: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    dtype = autocast_dtype(q)
    if dtype is None:
        return q, sources
    return q.to(dtype), [(k.to(dtype), v.to(dtype)) for k, v in sources]


def _check_tensors(q: Tensor, sources: Sequence[tuple[Tensor, Tensor]]) -> None:
    if q.dim() != 4:
        raise ValueError(f'queries must be (B, H, N, d), got {tuple(q.shape)}.')
    batch, heads, _, width = q.shape
    for k, v in sources:
        if k.shape != v.shape:
            raise ValueError(
                f'keys {tuple(k.shape)} and values {tuple(v.shape)} must have one shape.'
            )
        if k.dim() != 4 or k.shape[0] != batch or k.shape[3] != width or k.shape[2] == 0:
            raise ValueError(
                f'keys {tuple(k.shape)} do not fit queries {tuple(q.shape)}: they must be '
                f'({batch}, n_kv_heads, M, {width}) with M of at least 1.'
            )
        if k.shape[1] != sources[0][0].shape[1] or heads % k.shape[1]:
            raise ValueError(
                f'{k.shape[1]} key heads do not fit {heads} query heads: the number of query heads '
                'must be a multiple of n_kv_heads, which must be the same in both sources.'
            )
        for x in (k, v):
            if x.dtype != q.dtype:
                raise ValueError(
                    f'queries, keys and values must have one dtype, got {q.dtype} and {x.dtype}.'
                )
            if x.device != q.device:
                raise ValueError(
                    f'queries, keys and values must be on one device, got {q.device} and {x.device}.'
                )


# Paths


def _attend(
    q: Tensor, sources: Sequence[tuple[Tensor, Tensor]], causal: bool, backend: str
) -> Tensor:
    (k, v), (k2, v2) = sources[0], (sources[1] if len(sources) == 2 else (None, None))
    if backend == 'reference':
        return _reference(q, k, v, k2, v2, causal)
    if q.shape[2] == 1 and not _is_watched():
        # Decoding: the dispatch of an operator takes longer than the kernels that it calls.
        return _forward(q, k, v, k2, v2, causal, backend)[0]
    return torch.ops.asymloop.joint_attention.default(q, k, v, k2, v2, causal, backend)[0]


def _is_watched() -> bool:
    """Whether autograd, a compiler or a mode such as ``FlopCounterMode`` has to see the operator."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _single_query(q: Tensor, sources: Sequence[tuple[Tensor, Tensor]], backend: str) -> Tensor:
    """Decoding: the query heads that share a key head become the rows of one call."""
    batch, heads, _, width = q.shape
    kv_heads = sources[0][0].shape[1]
    if kv_heads == heads:
        return _attend(q, sources, False, backend)
    rows = q.reshape(batch, kv_heads, heads // kv_heads, width)
    return _attend(rows, sources, False, backend).reshape(batch, heads, 1, width)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, k2: Tensor | None, v2: Tensor | None, causal: bool
) -> Tensor:
    if causal:
        return _rows_first(reference_joint_attention(q, k, v, k2, v2))
    keys, values = (
        (k, v) if k2 is None or v2 is None else (torch.cat((k, k2), 2), torch.cat((v, v2), 2))
    )
    scores = q @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return _rows_first(scores.softmax(dim=-1) @ values)


def _masked_attention(q: Tensor, sources: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        raise ValueError(f'mask must be bool, true where a query sees a key, got {mask.dtype}.')
    batch, heads, n, _ = q.shape
    m = sources[0][0].shape[2]
    if any(k.shape[2] != m for k, _ in sources):
        raise ValueError('a mask applies to each source alike, so both need equally many keys.')
    try:
        mask = mask.expand(batch, 1, n, m)
    except RuntimeError:
        raise ValueError(
            f'mask {tuple(mask.shape)} must be broadcastable to (B, 1, N, M) = {(batch, 1, n, m)}.'
        ) from None
    k = torch.cat([k for k, _ in sources], dim=2)
    v = torch.cat([v for _, v in sources], dim=2)
    groups = heads // k.shape[1]
    visible = torch.cat([mask] * len(sources), dim=-1)
    out = F.scaled_dot_product_attention(
        q, _repeat_heads(k, groups), _repeat_heads(v, groups), attn_mask=visible
    )
    blind = ~visible.any(dim=-1, keepdim=True)
    return _rows_first(out.masked_fill(blind, 0.0))


# Layout


def _rows_first(x_BHNd: Tensor) -> Tensor:
    """The same tensor with the memory layout that the output projection reads without a copy."""
    return x_BHNd.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_rows_first(x_BHNd: Tensor) -> Tensor:
    batch, heads, n, width = x_BHNd.shape
    return x_BHNd.new_empty(batch, n, heads, width).transpose(1, 2)


def _unit_stride(x: Tensor) -> Tensor:
    # The raw kernels read a tensor whose last stride is not 1 as if it were.
    return x if x.stride(-1) == 1 else x.contiguous()


def _repeat_heads(x_BhMd: Tensor, groups: int) -> Tensor:
    return x_BhMd if groups == 1 else x_BhMd.repeat_interleave(groups, dim=1)


def _sum_heads(x_BHMd: Tensor, groups: int) -> Tensor:
    return x_BHMd if groups == 1 else x_BHMd.unflatten(1, (-1, groups)).sum(dim=2)


# Kernels: each takes one source and returns (out, log-sum-exp), or (dq, dk, dv) from the joint ones.


class _Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
    ]
    grouped: bool  # whether it takes fewer key heads than query heads
    lse_multiple: int  # rows of its log-sum-exp are padded to a multiple of this


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal)


def _cpu_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    if q.dtype in _HALF and not _multiplies_natively(q.dtype):
        # Emulated half-precision products would take more than ten times as long as these.
        wide = [x.float() for x in (do, q, k, v, out)]
        dq, dk, dv = run(*wide, lse, 0.0, causal)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    return run(do, q, k, v, out, lse, 0.0, causal)


@functools.cache
def _multiplies_natively(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal)
    return result[0], result[1]


def _cuda_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The random state is not read without dropout, but its tensors must exist.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        do, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        q, k, v, None, True, 0.0, causal
    )
    return result[0], result[1]


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        do, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal
    )[:3]


def _flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward as forward

    result = forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    return result[0].transpose(1, 2), result[1]


def _flash_attn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward

    dq, dk, dv = (_empty_rows_first(x) for x in (q, k, v))
    backward(
        *(x.transpose(1, 2) for x in (do, q, k, v, out)),
        lse,
        *(x.transpose(1, 2) for x in (dq, dk, dv)),
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        rng_state=None,
    )
    return dq, dk, dv


_KERNELS = {
    'cpu_flash': _Kernel(_cpu_flash_forward, _cpu_flash_backward, False, 1),
    'cuda_flash': _Kernel(_cuda_flash_forward, _cuda_flash_backward, True, 1),
    'flash_attn': _Kernel(_flash_attn_forward, _flash_attn_backward, True, 1),
    # Its backward wants the rows of the log-sum-exp aligned, so the padding stays; it holds +inf.
    'efficient': _Kernel(_efficient_forward, _efficient_backward, False, 32),
}


# The operator: the same code for every kernel.


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint keys become the one over their union; uses up ``out_b``."""
    weight_BHN1 = torch.sigmoid(lse_a - lse_b)[..., : out_a.shape[2], None]
    lse = torch.logaddexp(lse_a, lse_b)
    if out_a.dtype == weight_BHN1.dtype:
        return out_b.lerp_(out_a, weight_BHN1), lse
    return out_b.copy_(out_b.float().lerp_(out_a.float(), weight_BHN1)), lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2: Tensor | None,
    v2: Tensor | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    kernel = _KERNELS[backend]
    q = _unit_stride(q)
    groups = 1 if kernel.grouped else q.shape[1] // k.shape[1]

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = _repeat_heads(_unit_stride(k), groups), _repeat_heads(_unit_stride(v), groups)
        return kernel.forward(q, k, v, causal)

    out, lse = attend(k, v)
    if k2 is not None and v2 is not None:
        out, lse = _merge(*attend(k2, v2), out, lse)
    return _rows_first(out), lse.contiguous()


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2: Tensor | None,
    v2: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    backend: str,
) -> list[Tensor]:
    kernel = _KERNELS[backend]
    do, q = _unit_stride(do), _unit_stride(q)
    groups = 1 if kernel.grouped else q.shape[1] // k.shape[1]

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = _repeat_heads(_unit_stride(k), groups), _repeat_heads(_unit_stride(v), groups)
        dq, dk, dv = kernel.backward(do, q, k, v, out, lse, causal)
        return dq, _sum_heads(dk, groups), _sum_heads(dv, groups)

    dq, *grads = attend(k, v)
    if k2 is not None and v2 is not None:
        dq2, *grads2 = attend(k2, v2)
        dq.add_(dq2)
        grads += grads2
    return [_rows_first(x) for x in (dq, *grads)]


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2: Tensor | None,
    v2: Tensor | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    batch, heads, n, _ = q.shape
    multiple = _KERNELS[backend].lse_multiple
    rows = (n + multiple - 1) // multiple * multiple
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return _empty_rows_first(q), q.new_empty(batch, heads, rows, dtype=dtype)


def _fake_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2: Tensor | None,
    v2: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    backend: str,
) -> list[Tensor]:
    return [_empty_rows_first(x) for x in (q, k, v, k2, v2) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, k2, v2, ctx.causal, ctx.backend = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, k2, v2, out, lse)


def _autograd_backward(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 7
    grads = torch.ops.asymloop.joint_attention_backward.default(
        do, *ctx.saved_tensors, ctx.causal, ctx.backend
    )
    return (*grads, *(None,) * (7 - len(grads)))


def _matmul_flops(q_shape: Sequence[int], *k_shapes: Sequence[int] | None) -> int:
    batch, heads, n, width = q_shape
    return sum(2 * batch * heads * n * k[2] * width for k in k_shapes if k is not None)


def _forward_flops(
    q: Sequence[int], k: Sequence[int], v: Any, k2: Sequence[int] | None, *_: Any, **__: Any
) -> int:
    """Scores and values of the full N x M rectangle, as torch counts its own attention."""
    return 2 * _matmul_flops(q, k, k2)


def _backward_flops(
    do: Any,
    q: Sequence[int],
    k: Sequence[int],
    v: Any,
    k2: Sequence[int] | None,
    *_: Any,
    **__: Any,
) -> int:
    """Five products a source: the scores once more, and dP, dV, dQ and dK."""
    return 5 * _matmul_flops(q, k, k2)


def _register() -> None:
    name = 'asymloop::joint_attention'
    sources = 'Tensor q, Tensor k, Tensor v, Tensor? k2, Tensor? v2'
    choice = 'bool causal, str backend'
    torch.library.define(name, f'({sources}, {choice}) -> (Tensor, Tensor)')
    torch.library.define(
        f'{name}_backward', f'(Tensor do, {sources}, Tensor out, Tensor lse, {choice}) -> Tensor[]'
    )
    torch.library.impl(name, 'default', _forward)
    torch.library.impl(f'{name}_backward', 'default', _backward)
    torch.library.register_fake(name, _fake_forward)
    torch.library.register_fake(f'{name}_backward', _fake_backward)
    torch.library.register_autograd(name, _autograd_backward, setup_context=_setup_context)
    register_flop_formula(torch.ops.asymloop.joint_attention)(_forward_flops)
    register_flop_formula(torch.ops.asymloop.joint_attention_backward)(_backward_flops)


# An exported model carries a copy of this file: the first copy that a process imports registers.
if not hasattr(torch.ops.asymloop, 'joint_attention'):
    _register()
