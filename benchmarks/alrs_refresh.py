# SPDX-License-Identifier: Apache-2.0
"""A refresh of ALRS against ``torch.linalg.svdvals`` over the same matrices, one by one.

Ratios are medians of interleaved rounds in one process; the two-rank ratio compares one process with
two, both spawned here, one thread each. Ratios are given in CPU time too, which neighbours on shared
cores disturb less.

    python benchmarks/alrs_refresh.py [--quick] [--json]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault('OMP_NUM_THREADS', '1')

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from asymloop_foundry.algorithms.matrices import MATRIX_KINDS, roles_of
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.flops import training_flops
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM
from asymloop_foundry.spectra import alpha, measure, squared_singular_values

SIZES = {
    '60m': {'d_model': 768, 'n_heads': 6, 'd_ff': 2048, 'layers': 3},
    '1b': {'d_model': 2048, 'n_heads': 32, 'd_ff': 5461, 'layers': 12},
}
STEPS = {'60m': 3200, '1b': 38147}
# 1B on 32 H100: dense bf16 peak, and the share of it that training reaches.
GPUS, PEAK_FLOPS, UTILISATION = 32, 989e12, 0.4


def config_of(size, vocabulary=32128):
    fields = dict(SIZES[size])
    layers = fields.pop('layers')
    return AsymLoopConfig(
        vocab_size=vocabulary,
        n_encoder_layers=layers,
        n_decoder_layers=layers,
        num_iterations=3,
        qk_norm='decoder',
        **fields,
    )


def timed(function):
    """(wall seconds, CPU seconds) of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def matrices_of(size, quick):
    """The matrices of a whole refresh at 60M (quick: of a sixth of it); one of each shape at 1B."""
    d, m = SIZES[size]['d_model'], SIZES[size]['d_ff']
    square, wide = (1, 1) if size == '1b' else (5, 3) if quick else (30, 18)
    generator = torch.Generator().manual_seed(0)
    shapes = [(d, d)] * square + [(d, m) if i % 3 == 2 else (m, d) for i in range(wide)]
    return [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]


def ours(matrices):
    by_shape = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    return [
        alpha(squared_singular_values(same), larger_side=shape[1])
        for shape, same in by_shape.items()
    ]


def theirs(matrices):
    found = []
    for matrix in matrices:
        squares = torch.linalg.svdvals(matrix).flip(-1).square()
        tail = squares[len(squares) // 2 :]
        found.append(1 + len(tail) / torch.log(tail / tail[0]).sum())
    return found


def against_svdvals(size, rounds, quick):
    """Ratios of svdvals' time to ours, wall and CPU, and our seconds."""
    matrices = matrices_of(size, quick)
    ours(matrices[:1]), theirs(matrices[:1])
    wall, cpu, seconds = [], [], []
    for _ in tqdm(range(rounds), desc=f'{size} against svdvals', disable=None):
        fast, slow = timed(lambda: ours(matrices)), timed(lambda: theirs(matrices))
        wall.append(slow[0] / fast[0])
        cpu.append(slow[1] / fast[1])
        seconds.append(fast[1])
    return statistics.median(wall), statistics.median(cpu), statistics.median(seconds)


def measured_shapes(model):
    return {n: r.shape for n, r in roles_of(model).items() if r.kind in MATRIX_KINDS}


def _rank(rank, store, rounds, result):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    torch.manual_seed(0)
    model = AsymLoopForCausalLM(config_of('60m', vocabulary=64))
    shapes = measured_shapes(model)
    pairs = []
    for _ in range(rounds):
        alone = (0.0, 0.0)
        if rank == 0:
            with mock.patch('torch.distributed.is_initialized', return_value=False):
                alone = timed(lambda: measure(model, shapes))
        dist.barrier()
        shared = timed(lambda: measure(model, shapes))
        reports = [None, None]
        dist.all_gather_object(reports, (alone, shared))
        single = reports[0][0]
        pairs.append([single[i] / max(reports[r][1][i] for r in (0, 1)) for i in (0, 1)])
    if rank == 0:
        Path(result).write_text(json.dumps(pairs))
    # A rank that leaves while another is still receiving can leave that one waiting for ever.
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(rounds):
    """How much faster two ranks refresh the 60M model than one, wall and CPU of the slower rank."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / 'pairs.json'
        mp.spawn(_rank, (str(Path(folder) / 'store'), rounds, str(result)), nprocs=2)
        pairs = json.loads(result.read_text())
    return [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]


def refreshes(size):
    """Of the paper's schedule: one at the first step and every 100 steps in the first 20%."""
    return STEPS[size] // 5 // 100 + 1


def row_seconds(rounds):
    """CPU seconds of forward and backward of one row of 1,024 tokens, 60M, fp32."""
    torch.manual_seed(0)
    model = AsymLoopForCausalLM(config_of('60m'))
    tokens = torch.randint(32128, (1, 1024))

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()

    step()
    return statistics.median(timed(step)[1] for _ in range(rounds))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--quick', action='store_true', help='one round and fewer matrices')
    parser.add_argument('--json', action='store_true', help='ratios as JSON on the last line')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if arguments.quick else 5
    print(
        f'torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, '
        f'{rounds} rounds, load {os.getloadavg()[0]:.1f}'
    )
    small = against_svdvals('60m', 3 * rounds if arguments.quick else rounds, arguments.quick)
    large = against_svdvals('1b', rounds, arguments.quick)
    pair = two_ranks(rounds)
    refresh = small[2] * (6 if arguments.quick else 1)
    row = row_seconds(1 if arguments.quick else 3)
    share = refreshes('60m') * refresh / (STEPS['60m'] * 512 * row)
    # One of each 1B matrix was timed: 120 square and 72 wide ones share 32 ranks evenly. A CPU core
    # stands for each GPU's share, which bounds it from above.
    square, wide = (120, 72)
    matrices = matrices_of('1b', arguments.quick)
    each = [timed(lambda m=m: ours([m]))[1] for m in matrices]
    refresh_1b = (square * each[0] + wide * each[1]) / GPUS
    step_1b = training_flops(config_of('1b'), 512, 1024) / (GPUS * PEAK_FLOPS * UTILISATION)
    share_1b = refreshes('1b') * refresh_1b / (STEPS['1b'] * step_1b)
    numbers = {
        'vs_svdvals_60m': small[0],
        'vs_svdvals_60m_cpu_time': small[1],
        'vs_svdvals_1b': large[0],
        'vs_svdvals_1b_cpu_time': large[1],
        'two_ranks_60m': pair[0],
        'two_ranks_60m_cpu_time': pair[1],
        'cost_share_60m': share,
        'cost_share_1b_32_gpus': share_1b,
    }
    print(f'svdvals / ours, 60M refresh     {small[0]:8.2f} wall {small[1]:8.2f} CPU')
    print(f'svdvals / ours, 1B one of each  {large[0]:8.2f} wall {large[1]:8.2f} CPU')
    print(f'one rank / two ranks, 60M       {pair[0]:8.2f} wall {pair[1]:8.2f} CPU')
    print(
        f'ALRS / training, 60M            {share:.2e}: {refreshes("60m")} refreshes of '
        f'{refresh:.2f} s, {STEPS["60m"]} steps of 512 rows of {row:.2f} s (all CPU seconds here)'
    )
    print(
        f'ALRS / training, 1B, {GPUS} GPUs   {share_1b:.2e}: {refreshes("1b")} refreshes of '
        f'{refresh_1b:.2f} s (a CPU core per rank), {STEPS["1b"]} steps of {step_1b:.2f} s '
        f'(arithmetic: {UTILISATION:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s each)'
    )
    if arguments.json:
        print(json.dumps({name: round(value, 6) for name, value in numbers.items()}))


if __name__ == '__main__':
    main()
