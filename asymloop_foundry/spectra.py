# SPDX-License-Identifier: Apache-2.0
"""Spectra of weight matrices, whatever their sharding: tail exponent and stable rank.

Pure functions of tensors and of a module's parameters; nothing here knows Composer or a model.

The tail exponent (spec section 2, the paper's estimator of the exponent of ``p(lambda) ~
lambda^-alpha``) needs only the largest half of the squared singular values, so it is read off the
Gram matrix of the smaller side, whose eigenvalues they are. Squaring the condition number costs
accuracy only in the small eigenvalues: the float32 result is kept where the largest exceeds the
smallest of the tail by less than :data:`FLOAT32_RANGE`, a float64 Gram matrix serves up to
:data:`FLOAT64_RANGE`, and what lies beyond takes a float64 singular value decomposition.

Shape legend: B matrices of one size, M smaller side, S larger side.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import scipy.linalg
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module
from tqdm import tqdm

__all__ = [
    'Spectrum',
    'SpectrumError',
    'alpha',
    'clean_name',
    'matrix_names',
    'measure',
    'normalized_stable_rank',
    'squared_singular_values',
]

Estimator = Literal['auto', 'float64']

FLOAT32_RANGE = 1e5
"""Largest ratio of eigenvalues for which a float32 Gram matrix keeps alpha within 1e-4."""

FLOAT64_RANGE = 1e10
"""The same for a float64 Gram matrix."""

CONSTANT_LOG_SPREAD = 1e-5
"""A tail whose mean log ratio is below this is constant up to the rounding of the weights."""

GRAM_ROWS = 256
"""Rows per product when the lower triangle of a Gram matrix is filled."""

_WRAPPERS = re.compile(
    r'(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.'
)
_BLOCK = re.compile(r'^.*?\.\d+(?=\.)')


class SpectrumError(ValueError):
    """A matrix has no usable spectrum; the message names the matrix."""


@dataclass(frozen=True)
class Spectrum:
    """What one decomposition says about a matrix.

    Attributes:
        alpha: Tail exponent, None where the tail is constant or the matrix zero.
        stable_rank: ``||W||_F^2 / (||W||_2^2 min(shape))``, in (0, 1]; None for a zero matrix.
    """

    alpha: float | None
    stable_rank: float | None


def _tail_start(count: int, tail_fraction: float) -> int:
    """Index of the smallest eigenvalue of the tail among ``count`` ascending ones."""
    return min(math.floor(count * (1.0 - tail_fraction)), count - 1)


def _floored(eigenvalues_BM: torch.Tensor, larger_side: int) -> torch.Tensor:
    """Raises what is below float64's numerical rank to that level, so that a logarithm exists."""
    tolerance = (torch.finfo(torch.float64).eps * larger_side) ** 2
    return torch.maximum(eigenvalues_BM, eigenvalues_BM[..., -1:] * tolerance)


def alpha(
    eigenvalues_BM: torch.Tensor, tail_fraction: float = 0.5, larger_side: int | None = None
) -> torch.Tensor:
    """Tail exponent of the largest part of a spectrum (spec section 2).

    ``alpha = 1 + n / sum(log(tail / tail[0]))`` over the n largest of the squared singular values,
    ``tail = lambda[floor(n_total (1 - tail_fraction)):]``. Values below the numerical rank of
    float64, ``(eps * larger side)^2`` of the largest, are counted as that level.

    Args:
        eigenvalues_BM: Squared singular values, ascending, float64, shape (..., M).
        tail_fraction: Share of the spectrum in the tail, in (0, 1]. Default: ``0.5``.
        larger_side: Larger side of the matrix, for the numerical rank. Default: M.

    Returns:
        Shape (...), ``inf`` where the tail is constant and ``nan`` where it is all zero.
    """
    count = eigenvalues_BM.shape[-1]
    floored = _floored(eigenvalues_BM, larger_side or count)
    tail = floored[..., _tail_start(count, tail_fraction) :]
    spread = torch.log(tail / tail[..., :1]).mean(-1)
    return torch.where(spread < CONSTANT_LOG_SPREAD, math.inf, 1.0 + 1.0 / spread)


def normalized_stable_rank(eigenvalues_BM: torch.Tensor) -> torch.Tensor:
    """``||W||_F^2 / (||W||_2^2 min(shape))`` from squared singular values, ascending (Figure 4).

    Args:
        eigenvalues_BM: Shape (..., M).

    Returns:
        Shape (...), in (0, 1]; ``nan`` for a zero matrix.
    """
    largest = eigenvalues_BM[..., -1]
    return eigenvalues_BM.sum(-1) / (largest * eigenvalues_BM.shape[-1])


@contextlib.contextmanager
def _true_float32() -> Iterator[None]:
    """Products in the precision of their operands: no TF32, no bfloat16, no autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    try:
        with torch.autocast('cpu', enabled=False), torch.autocast('cuda', enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _largest(matrix: torch.Tensor) -> float:
    """Largest absolute value, ``nan`` if there is one."""
    return max(abs(extreme.item()) for extreme in matrix.aminmax())


def _exponent(matrix: torch.Tensor) -> int:
    """Binary exponent to divide by; 0 where squares are far from the limits of float32 as it is."""
    exponent = math.frexp(_largest(matrix))[1]
    return exponent if abs(exponent) > 20 else 0


def _scaled(matrix_MS: torch.Tensor, exponent: int, dtype: torch.dtype) -> torch.Tensor:
    """``matrix / 2^exponent``, exact in ``dtype`` but for what underflows."""
    if exponent == 0:
        return matrix_MS.to(dtype)
    if abs(exponent) > 100 or dtype == torch.float64:
        return (matrix_MS.double() * 2.0**-exponent).to(dtype)
    return matrix_MS.to(dtype) * 2.0**-exponent


def _gram(matrix_MS: torch.Tensor) -> torch.Tensor:
    """Lower triangle of ``W W^T``; what is above the diagonal is unspecified.

    Row blocks halve the work of the full product, for a symmetric rank-k update that torch lacks.
    """
    gram_MM = matrix_MS.new_zeros(matrix_MS.shape[0], matrix_MS.shape[0])
    for start in range(0, matrix_MS.shape[0], GRAM_ROWS):
        stop = min(start + GRAM_ROWS, matrix_MS.shape[0])
        gram_MM[start:stop, :stop] = matrix_MS[start:stop] @ matrix_MS[:stop].mT
    return gram_MM


def _eigenvalues(grams: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Eigenvalues of each Gram matrix, ascending, in float64.

    One call serves the whole batch on an accelerator. On the CPU LAPACK would take them one by one
    anyway, and inside a batch an odd size leaves them differently aligned, which shows in the last
    bits; there, a matrix must give the same bits whichever others share its batch. SciPy's ``evr``
    is the fastest of the values-only drivers, torch's included.
    """
    if grams[0].device.type != 'cpu':
        return list(torch.linalg.eigvalsh(torch.stack(list(grams))).double())
    found = []
    for gram_MM in grams:
        try:
            # The lower triangle by rows is the upper one by columns, as LAPACK reads it: no copy.
            values = scipy.linalg.eigvalsh(
                gram_MM.numpy().T, lower=False, driver='evr', overwrite_a=True, check_finite=False
            )
        except scipy.linalg.LinAlgError as error:
            raise torch.linalg.LinAlgError(str(error)) from error
        found.append(torch.from_numpy(values).double())
    return found


def _by_svd(matrix_MS: torch.Tensor, exponent: int) -> torch.Tensor:
    return torch.linalg.svdvals(_scaled(matrix_MS, exponent, torch.float64)).flip(-1).square()


def _within(eigenvalues_M: torch.Tensor, start: int, limit: float) -> bool:
    largest, smallest = eigenvalues_M[-1].item(), eigenvalues_M[start].item()
    return smallest > 0 and largest <= limit * smallest


def _refined(matrix_MS: torch.Tensor, exponent: int, start: int) -> torch.Tensor:
    """Float64 eigenvalues: from the Gram matrix where that suffices, else from the matrix."""
    [eigenvalues_M] = _eigenvalues([_gram(_scaled(matrix_MS, exponent, torch.float64))])
    if _within(eigenvalues_M, start, FLOAT64_RANGE):
        return eigenvalues_M
    return _by_svd(matrix_MS, exponent)


def squared_singular_values(
    matrices: Sequence[torch.Tensor],
    *,
    estimator: Estimator = 'auto',
    tail_fraction: float = 0.5,
) -> torch.Tensor:
    """Squared singular values of matrices of one size (each may be transposed), batched.

    Accurate in the tail that ``tail_fraction`` selects; below it a value may be rounding noise
    when ``estimator`` is ``auto``. A decomposition that fails is repeated once in float64 on the
    CPU.

    Args:
        matrices: B tensors of shape (M, S) or (S, M), finite.
        estimator: ``auto`` takes the cheapest exact method, ``float64`` a float64 singular value
            decomposition. Default: ``auto``.
        tail_fraction: Share of the spectrum that must be accurate. Default: ``0.5``.

    Returns:
        Shape (B, M), ascending, float64, on the CPU. All zero for a zero matrix.

    Raises:
        torch.linalg.LinAlgError: A decomposition failed in float64 on the CPU too.
    """
    wide = [_wide(matrix.detach()) for matrix in matrices]
    exponents = [_exponent(matrix) for matrix in wide]
    start = _tail_start(wide[0].shape[0], tail_fraction)
    with torch.no_grad(), _true_float32():
        try:
            if estimator == 'float64':
                found = [_by_svd(m, e) for m, e in zip(wide, exponents, strict=True)]
            else:
                found = _eigenvalues(
                    [
                        _gram(_scaled(m, e, torch.float32))
                        for m, e in zip(wide, exponents, strict=True)
                    ]
                )
                for index, eigenvalues_M in enumerate(found):
                    if not _within(eigenvalues_M, start, FLOAT32_RANGE):
                        found[index] = _refined(wide[index], exponents[index], start)
            if not all(torch.isfinite(eigenvalues_M).all() for eigenvalues_M in found):
                raise torch.linalg.LinAlgError(
                    'a decomposition returned values that are not finite'
                )
        except torch.linalg.LinAlgError:
            found = [_by_svd(m.cpu(), e) for m, e in zip(wide, exponents, strict=True)]
        scales = [4.0**exponent for exponent in exponents]
        return torch.stack([f.cpu().clamp_min(0) * s for f, s in zip(found, scales, strict=True)])


def clean_name(name: str) -> str:
    """A parameter's name without what FSDP, activation checkpointing and compilation add to it."""
    return _WRAPPERS.sub('', name)


@dataclass(frozen=True)
class _Weight:
    """One parameter of the model, as this rank holds it.

    ``shape`` is that of the whole parameter, 2-D, or 3-D for a stack of matrices; ``group`` is the
    process group over which it is cut into row-major pieces, None where this rank holds all of it.
    """

    name: str
    local: torch.Tensor
    shape: torch.Size
    group: dist.ProcessGroup | None

    @property
    def block(self) -> str:
        """The layer that the matrix belongs to: its name up to the first number."""
        match = _BLOCK.match(self.name)
        return match.group() if match else self.name

    @property
    def sides(self) -> tuple[int, int]:
        """Smaller and larger side of its matrices."""
        return min(self.shape[-2:]), max(self.shape[-2:])

    @property
    def cost(self) -> float:
        """Relative time of its decompositions: the Gram product and three times a square one."""
        smaller, larger = self.sides
        count = self.shape[0] if len(self.shape) == 3 else 1
        return count * smaller**2 * (larger + 3.0 * smaller)


def matrix_names(name: str, shape: Sequence[int]) -> list[str]:
    """Names of the matrices in a parameter: its own, or one per leading index of a 3-D one."""
    return [name] if len(shape) == 2 else [f'{name}.{index}' for index in range(shape[0])]


def _release_unsharded(model: Module) -> None:
    """Puts every FSDP module back on its shards, which are the full-precision weights.

    After an evaluation, FSDP may leave the gathered copy in place (the root always, every module
    under SHARD_GRAD_OP), in the precision of the computation.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            handle = module._handle
            if handle is None or not handle.uses_sharded_strategy:
                continue
            if not handle.is_sharded(handle.flat_param):
                _reshard(module, handle, free_unsharded_flat_param=True)


def _shard_group(name: str, parameter: DTensor) -> dist.ProcessGroup | None:
    group = None
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            continue
        if not (isinstance(placement, Shard) and placement.dim == 0) or group is not None:
            raise SpectrumError(
                f'{name} is placed as {parameter.placements}: only FSDP, which cuts the first '
                'dimension over one mesh dimension, is supported. Remove tensor parallelism.'
            )
        group = parameter.device_mesh.get_group(dimension)
    return group


def _locate(model: Module, shapes: Mapping[str, torch.Size]) -> list[_Weight]:
    """The named parameters of the model, in the order of ``shapes``, the same on every rank."""
    _release_unsharded(model)
    flat_groups = {
        f'{name}.' if name else '': module.process_group
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }
    found: dict[str, _Weight] = {}
    for raw_name, parameter in model.named_parameters():
        name = clean_name(raw_name)
        # DistributedDataParallel is the outermost wrapper and names what it wraps "module".
        if name not in shapes:
            name = name.removeprefix('module.')
        if name not in shapes:
            continue
        local, group = parameter.detach(), None
        if isinstance(parameter, DTensor):
            group = _shard_group(name, parameter)
            local = parameter.to_local().detach()
        elif local.shape != shapes[name]:
            owners = [prefix for prefix in flat_groups if raw_name.startswith(prefix)]
            if not owners:
                raise SpectrumError(
                    f'{name} has shape {tuple(local.shape)} where {tuple(shapes[name])} was '
                    'recorded, and no FSDP module above it explains why.'
                )
            group = flat_groups[max(owners, key=len)]
        found[name] = _Weight(name, local, shapes[name], group)
    missing = [name for name in shapes if name not in found]
    if missing:
        raise SpectrumError(
            f'{missing[0]} and {len(missing) - 1} more are not parameters of the wrapped model. '
            'FSDP1 needs use_orig_params: true.'
        )
    return [found[name] for name in shapes]


def _plan(weights: Sequence[_Weight], ranks: int) -> list[list[list[_Weight]]]:
    """Who decomposes what: per rank, units of same-sized matrices of one layer.

    The largest remaining unit goes to the least loaded rank. With fewer units than ranks each
    matrix is a unit of its own.
    """
    by_size: dict[tuple[str, tuple[int, int]], list[_Weight]] = {}
    for weight in weights:
        by_size.setdefault((weight.block, weight.sides), []).append(weight)
    units = list(by_size.values())
    if len(units) < ranks:
        units = [[weight] for weight in weights]
    load = [0.0] * ranks
    plan: list[list[list[_Weight]]] = [[] for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: -sum(weight.cost for weight in unit)):
        rank = load.index(min(load))
        load[rank] += sum(weight.cost for weight in unit)
        plan[rank].append(unit)
    return plan


def _whole(weight: _Weight, owner: int, rank: int) -> torch.Tensor | None:
    """The whole parameter on rank ``owner``, None elsewhere; a collective of its shard group."""
    if weight.group is None:
        return weight.local if rank == owner else None
    members = dist.get_process_group_ranks(weight.group)
    if owner not in members:
        return None
    piece = weight.local.reshape(-1)
    length = torch.tensor([piece.numel()], dtype=torch.int64, device=piece.device)
    lengths = [torch.empty_like(length) for _ in members]
    dist.all_gather(lengths, length, group=weight.group)
    counts = [int(count.item()) for count in lengths]
    padded = piece.new_zeros(max(counts))
    padded[: piece.numel()] = piece
    pieces = [torch.empty_like(padded) for _ in members] if rank == owner else None
    dist.gather(padded, pieces, dst=owner, group=weight.group)
    if pieces is None:
        return None
    whole = torch.cat([p[:count] for p, count in zip(pieces, counts, strict=True)])
    return whole.view(weight.shape)


# Travel in the shared table as numbers, so that every rank raises the same error.
_OK, _ZERO, _NOT_FINITE, _CONSTANT, _FAILED = range(5)


def _eigenvalues_or_nan(
    matrices: Sequence[torch.Tensor], estimator: Estimator, tail_fraction: float
) -> torch.Tensor:
    """:func:`squared_singular_values`, with a row of NaN for a matrix that cannot be decomposed."""
    try:
        return squared_singular_values(matrices, estimator=estimator, tail_fraction=tail_fraction)
    except torch.linalg.LinAlgError:
        if len(matrices) == 1:
            return torch.full((1, min(matrices[0].shape)), math.nan, dtype=torch.float64)
    return torch.cat([_eigenvalues_or_nan([m], estimator, tail_fraction) for m in matrices])


def _unit_spectra(
    unit: Sequence[torch.Tensor], estimator: Estimator, tail_fraction: float
) -> list[tuple[float, float, int]]:
    """(alpha, stable rank, status) of each matrix of a unit.

    Never raises for a bad matrix: the other ranks wait for this one's rows.
    """
    matrices = [matrix for tensor in unit for matrix in (tensor if tensor.dim() == 3 else [tensor])]
    results = []
    usable = []
    for matrix in matrices:
        largest = _largest(matrix)
        status = _ZERO if largest == 0 else _OK if math.isfinite(largest) else _NOT_FINITE
        results.append((0.0, 0.0, status))
        if status == _OK:
            usable.append(matrix)
    if not usable:
        return results
    spectra = iter(_eigenvalues_or_nan(usable, estimator, tail_fraction))
    for index, matrix in enumerate(matrices):
        if results[index][2] != _OK:
            continue
        eigenvalues_M = next(spectra)
        exponent = alpha(eigenvalues_M, tail_fraction, max(matrix.shape)).item()
        rank = normalized_stable_rank(eigenvalues_M).item()
        if math.isnan(exponent) or math.isnan(rank):
            results[index] = (0.0, 0.0, _FAILED)
        elif math.isinf(exponent):
            results[index] = (0.0, rank, _CONSTANT)
        else:
            results[index] = (exponent, rank, _OK)
    return results


def measure(
    model: Module,
    shapes: Mapping[str, torch.Size],
    *,
    estimator: Estimator = 'auto',
    tail_fraction: float = 0.5,
) -> dict[str, Spectrum]:
    """Spectra of the named weights, each decomposed once, by one rank; equal bits on every rank.

    A collective over the default process group where there is one: every rank must call it, between
    optimizer steps. Works on a plain model and under DDP, FSDP1 with ``use_orig_params`` and FSDP2.
    Decompositions are spread over the ranks; a rank holds the whole of at most one layer at a time,
    beside its own shards.

    Args:
        model: The model as it is now, wrapped or not.
        shapes: Clean name (:func:`clean_name`) to whole shape of every parameter wanted, in the
            same order on every rank; 2-D, or 3-D for one matrix per leading index.
        estimator: See :func:`squared_singular_values`. Default: ``auto``.
        tail_fraction: Share of the spectrum in the tail. Default: ``0.5``.

    Returns:
        By name, of the parameter or ``name.index`` for a 3-D one; in the order of ``shapes``.

    Raises:
        SpectrumError: A weight is not finite, cannot be decomposed, or cannot be found.
    """
    weights = _locate(model, shapes)
    ranks, rank = 1, 0
    if dist.is_available() and dist.is_initialized():
        ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = _plan(weights, ranks)
    names = [n for weight in weights for n in matrix_names(weight.name, weight.shape)]
    row_of = {name: row for row, name in enumerate(names)}
    table = torch.zeros(len(names), 3, dtype=torch.float64)
    rounds = max((len(units) for units in plan), default=0)
    silent = None if rank == 0 else True  # None: shown on a terminal alone
    for turn in tqdm(range(rounds), desc='spectra', delay=5, disable=silent, leave=False):
        mine: list[_Weight] = []
        gathered: list[torch.Tensor] = []
        for owner, units in enumerate(plan):
            for weight in units[turn] if turn < len(units) else ():
                whole = _whole(weight, owner, rank)
                if whole is not None:
                    mine.append(weight)
                    gathered.append(whole)
        if not mine:
            continue
        rows = [row_of[n] for weight in mine for n in matrix_names(weight.name, weight.shape)]
        for row, values in zip(
            rows, _unit_spectra(gathered, estimator, tail_fraction), strict=True
        ):
            table[row] = torch.tensor(values, dtype=torch.float64)
    if ranks > 1:
        # One rank wrote each row and all others hold zeros there, so the sum is exact.
        device = weights[0].local.device
        shared = table.to(device)
        dist.all_reduce(shared)
        table = shared.cpu()
    return {name: _result(name, table[row].tolist()) for name, row in row_of.items()}


def _result(name: str, values: Sequence[float]) -> Spectrum:
    exponent, rank, status = values[0], values[1], round(values[2])
    if status == _NOT_FINITE:
        raise SpectrumError(
            f'{name} holds NaN or infinite values. Resume from an earlier checkpoint with a lower '
            'learning rate, or with gradient clipping.'
        )
    if status == _FAILED:
        raise SpectrumError(
            f'the decomposition of {name} did not converge, in float64 on the CPU either. Exclude '
            'it by name, or resume from an earlier checkpoint.'
        )
    if status == _ZERO:
        return Spectrum(None, None)
    return Spectrum(None if status == _CONSTANT else exponent, rank)
