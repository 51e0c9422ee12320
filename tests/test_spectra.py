# SPDX-License-Identifier: Apache-2.0
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asymloop_foundry import spectra
from asymloop_foundry.spectra import (
    Spectrum,
    SpectrumError,
    alpha,
    clean_name,
    measure,
    normalized_stable_rank,
    squared_singular_values,
)


def reference(matrix, tail_fraction=0.5):
    """(alpha, stable rank) from numpy's float64 singular values, in the words of the paper."""
    squares = np.sort(np.linalg.svd(matrix.double().numpy(), compute_uv=False) ** 2)
    tail = squares[math.floor(len(squares) * (1 - tail_fraction)) :]
    exponent = 1 + len(tail) / np.sum(np.log(tail / tail[0]))
    return exponent, squares.sum() / (squares[-1] * len(squares))


def found(matrix, **options):
    eigenvalues = squared_singular_values([matrix], **options)
    fraction = options.get('tail_fraction', 0.5)
    exponent = alpha(eigenvalues, fraction, max(matrix.shape))
    return exponent.item(), normalized_stable_rank(eigenvalues).item()


def with_spectrum(rows, columns, singular_values):
    """A matrix with these singular values and random singular vectors, without an SVD."""
    left = torch.linalg.qr(torch.randn(rows, len(singular_values), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, len(singular_values), dtype=torch.float64))[0]
    return ((left * singular_values) @ right.T).float()


def gaussian(rows, columns):
    return torch.randn(rows, columns) * 0.02


def heavy_tailed(exponent):
    def build(rows, columns):
        order = torch.arange(1, min(rows, columns) + 1, dtype=torch.float64)
        return with_spectrum(rows, columns, order**-exponent)

    return build


def low_rank(share):
    def build(rows, columns):
        rank = max(1, int(share * min(rows, columns)))
        return torch.randn(rows, rank) @ torch.randn(rank, columns)

    return build


def badly_scaled_rows(rows, columns):
    return torch.randn(rows, columns) * torch.logspace(-6, 2, rows)[:, None]


def scaled(factor):
    return lambda rows, columns: torch.randn(rows, columns) * factor


CASES = {
    'gaussian': gaussian,
    'power_0.5': heavy_tailed(0.5),
    'power_1': heavy_tailed(1.0),
    'power_2': heavy_tailed(2.0),
    'rank_60_percent': low_rank(0.6),
    'rank_30_percent': low_rank(0.3),
    'rows_over_eight_decades': badly_scaled_rows,
    'times_1e-30': scaled(1e-30),
    'times_1e25': scaled(1e25),
}
# 60M and 135M have 768 x 768 and 768 x 2048; 350M 1024 and 2736; 1B 2048 and 5461.
SMALL_SHAPES = [(48, 48), (48, 128), (128, 48), (33, 57)]
PAPER_SHAPES = [(768, 768), (768, 2048), (2048, 768), (1024, 1024), (2736, 1024)]
LARGE_SHAPES = [(2048, 2048), (2048, 5461)]


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('shape', SMALL_SHAPES, ids=str)
def test_alpha_and_stable_rank_equal_a_float64_svd(shape, case):
    torch.manual_seed(0)
    matrix = CASES[case](*shape)
    exponent, rank = reference(matrix)
    assert found(matrix) == (pytest.approx(exponent, abs=1e-3), pytest.approx(rank, rel=1e-5))


@pytest.mark.parametrize(
    ('shape', 'case'),
    [
        ((768, 768), 'gaussian'),
        ((768, 768), 'power_2'),
        ((2048, 768), 'rows_over_eight_decades'),
        ((768, 2048), 'gaussian'),
        ((1024, 1024), 'gaussian'),
        ((1024, 2736), 'gaussian'),
    ],
    ids=str,
)
def test_alpha_holds_to_1e_3_on_the_papers_shapes(shape, case):
    torch.manual_seed(1)
    matrix = CASES[case](*shape)
    assert found(matrix)[0] == pytest.approx(reference(matrix)[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('shape', PAPER_SHAPES + LARGE_SHAPES, ids=str)
def test_alpha_holds_to_1e_3_for_every_kind_of_matrix_at_every_scale(shape, case):
    torch.manual_seed(2)
    matrix = CASES[case](*shape)
    assert found(matrix)[0] == pytest.approx(reference(matrix)[0], abs=1e-3)


@given(
    rows=st.integers(2, 40),
    columns=st.integers(2, 40),
    decades=st.floats(0.5, 12),
    fraction=st.sampled_from([0.25, 0.5, 0.9]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_any_decaying_spectrum_gives_the_reference(rows, columns, decades, fraction, seed):
    torch.manual_seed(seed)
    values = torch.logspace(0, -decades / 2, min(rows, columns), dtype=torch.float64)
    matrix = with_spectrum(rows, columns, values)
    exponent, _ = reference(matrix, fraction)
    measured, _ = found(matrix, tail_fraction=fraction)
    if math.isfinite(exponent):
        assert measured == pytest.approx(exponent, rel=1e-3)
    else:
        assert math.isinf(measured)


def test_the_float64_estimator_is_the_svd_itself():
    matrix = torch.randn(24, 40)
    assert found(matrix, estimator='float64')[0] == pytest.approx(reference(matrix)[0], rel=1e-12)


def test_a_batch_gives_each_matrix_the_bits_it_has_alone_transposed_or_not():
    matrices = [torch.randn(15, 31), torch.randn(31, 15), heavy_tailed(3.0)(15, 31)]
    together = squared_singular_values(matrices)
    for row, matrix in zip(together, matrices, strict=True):
        assert torch.equal(row, squared_singular_values([matrix])[0])


@pytest.mark.parametrize('precision', ['high', 'medium'])
def test_reduced_matmul_precision_of_the_run_neither_leaks_in_nor_is_changed(precision):
    matrix = torch.randn(64, 96)
    expected = found(matrix)
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast('cpu', dtype=torch.bfloat16):
            assert found(matrix) == expected
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision('highest')


def test_half_the_values_missing_gives_a_number_of_the_numerical_rank():
    matrix = torch.zeros(40, 60)
    matrix[:10] = torch.randn(10, 60)
    exponent, _ = found(matrix)
    # Half of the 20 tail values are at (60 eps)^2 of the largest, the other half near the largest.
    floor = -2 * math.log(60 * torch.finfo(torch.float64).eps)
    assert exponent == pytest.approx(1 + 2 / floor, abs=0.005)


@pytest.mark.parametrize('name', ['_fsdp_wrapped_module.', '_checkpoint_wrapped_module.'])
def test_wrappers_leave_no_trace_in_a_name(name):
    assert clean_name(f'_orig_mod.model.{name}decoder.0.{name}attn.q_proj.weight') == (
        'model.decoder.0.attn.q_proj.weight'
    )


class Holder(torch.nn.Module):
    def __init__(self, **weights):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight))

    def shapes(self):
        return {name: parameter.shape for name, parameter in self.named_parameters()}


def measured(**weights):
    model = Holder(**weights)
    return measure(model, model.shapes())


def test_a_stack_of_experts_gives_a_spectrum_each():
    experts = torch.randn(3, 12, 20)
    result = measured(experts=experts)
    assert list(result) == ['experts.0', 'experts.1', 'experts.2']
    for expert, spectrum in zip(experts, result.values(), strict=True):
        exponent, rank = reference(expert)
        assert spectrum == Spectrum(pytest.approx(exponent, abs=1e-3), pytest.approx(rank))


def test_a_zero_matrix_has_neither_number():
    assert measured(zero=torch.zeros(8, 8))['zero'] == Spectrum(None, None)


def test_a_constant_spectrum_has_a_stable_rank_alone():
    orthogonal = torch.nn.init.orthogonal_(torch.empty(32, 48))
    assert measured(q=orthogonal)['q'] == Spectrum(None, pytest.approx(1.0, rel=1e-5))


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(value):
    bad = torch.randn(8, 8)
    bad[3, 4] = value
    with pytest.raises(SpectrumError, match=r'broken holds NaN or infinite'):
        measured(fine=torch.randn(8, 8), broken=bad)


def test_a_failed_decomposition_is_repeated_in_float64_on_the_cpu(monkeypatch):
    matrix = torch.randn(12, 20)
    calls = []

    def failing(gram, **_):
        calls.append(gram.dtype)
        raise np.linalg.LinAlgError('did not converge')

    monkeypatch.setattr(scipy.linalg, 'eigvalsh', failing)
    assert found(matrix)[0] == pytest.approx(reference(matrix)[0], rel=1e-9)
    assert calls == [np.float32]


def test_a_decomposition_that_fails_twice_names_the_matrix(monkeypatch):
    def failing(matrix, **_):
        raise torch.linalg.LinAlgError('did not converge')

    svdvals = torch.linalg.svdvals
    monkeypatch.setattr(scipy.linalg, 'eigvalsh', failing)
    monkeypatch.setattr(
        torch.linalg, 'svdvals', lambda m: failing(m) if m.shape == (7, 9) else svdvals(m)
    )
    with pytest.raises(SpectrumError, match='hard did not converge'):
        measured(easy=torch.randn(6, 9), hard=torch.randn(7, 9))


def test_a_name_that_the_model_lacks_is_reported():
    with pytest.raises(SpectrumError, match=r'^gone and 0 more are not parameters'):
        measure(Holder(q=torch.randn(4, 4)), {'gone': torch.Size([4, 4])})


def test_every_rank_has_work_and_no_unit_spans_two_layers():
    weights = [
        spectra._Weight(f'model.{stack}.{i}.{n}', torch.empty(0), torch.Size(shape), None)
        for stack in ('encoder', 'decoder')
        for i in range(3)
        for n, shape in [('q', (8, 8)), ('k', (8, 8)), ('up', (20, 8)), ('down', (8, 20))]
    ]
    for ranks in (1, 2, 5, 16, 24):
        plan = spectra._plan(weights, ranks)
        names = [w.name for units in plan for unit in units for w in unit]
        assert sorted(names) == sorted(w.name for w in weights)
        assert all(plan)
        for unit in (unit for units in plan for unit in units):
            assert len({(w.block, w.sides) for w in unit}) == 1


# --- two processes ---

STRATEGIES = (
    'ddp',
    'fsdp1_full_shard',
    'fsdp1_shard_grad_op',
    'fsdp1_no_shard',
    'fsdp2',
    'fsdp2_keep_gathered',
)


@pytest.fixture(scope='module')
def sharded(tmp_path_factory):
    result = tmp_path_factory.mktemp('spectra') / 'spectra.json'
    script = Path(__file__).parent / 'distributed' / 'sharded_spectra.py'
    run = subprocess.run(
        [
            *(sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2'),
            *(str(script), str(result)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize('moment', ['before_training', 'after_step', 'after_evaluation'])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_sharded_spectra_have_the_bits_of_whole_weights(sharded, strategy, moment):
    report = sharded[f'{strategy}-{moment}']
    first, second = report['ranks']
    assert first['values'] == second['values'] == report['plain']


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_each_matrix_is_decomposed_once_and_no_rank_holds_more_than_a_layer(sharded, strategy):
    report = sharded[f'{strategy}-after_step']
    first, second = report['ranks']
    assert first['decomposed'] + second['decomposed'] == len(report['plain'])
    assert min(first['decomposed'], second['decomposed']) >= len(report['plain']) // 2 - 1
    layer = 2 * 15 * 15 + 2 * 15 * 23 + 3 * 15 * 15
    assert 0 < max(first['held'], second['held']) <= layer


def test_what_breaks_on_one_rank_is_raised_on_all_by_name(sharded):
    assert sharded['broken'] == ['1.up_proj.weight holds NaN or infinite values'] * 2
