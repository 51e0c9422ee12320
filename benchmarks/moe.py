# SPDX-License-Identifier: Apache-2.0
"""Sparse experts against the dense feed-forward part of the same active size, in training.

Table 14's 60M models with and without experts, forward plus backward on random tokens. A sparse model
does the dense one's arithmetic and its routers', so the ratio that counts is of tokens per second per
active GFLOP: 1 means that experts cost their arithmetic and nothing else.

- ``layer``: one feed-forward part alone.
- ``dense``, ``full_loop``, ``asymloop``: whole models, with loss and router losses.

    python benchmarks/moe.py --threads 1 --clock cpu
"""

from collections.abc import Callable
from typing import Any

import torch
from common import Times, interleave, parser, print_environment, print_ratios, print_times, ratio

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.flops import training_flops
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM, SwiGLU
from asymloop_foundry.models.moe import MixtureOfExperts

SYSTEMS: dict[str, dict[str, Any]] = {
    'dense': {'n_encoder_layers': 6, 'n_decoder_layers': 0, 'num_iterations': 1},
    'full_loop': {
        'n_encoder_layers': 0,
        'n_decoder_layers': 6,
        'num_iterations': 2,
        'global_kv': False,
    },
    'asymloop': {
        'n_encoder_layers': 3,
        'n_decoder_layers': 3,
        'num_iterations': 3,
        'qk_norm': 'decoder',
    },
}
EXPERTS: dict[str, Any] = {'d_ff': 1024, 'n_experts': 8}


def layers(n_tokens: int) -> tuple[dict[str, Callable[[], object]], float]:
    """One step of each feed-forward part, and the ratio of their active FLOPs."""
    sparse = AsymLoopConfig(d_model=768, n_heads=6, **EXPERTS)
    dense = AsymLoopConfig(d_model=768, n_heads=6, d_ff=2048)
    parts = {
        'sparse': MixtureOfExperts(sparse, (SwiGLU(sparse) for _ in range(sparse.n_experts))),
        'dense': SwiGLU(dense),
    }
    x_BND = torch.randn(1, n_tokens, 768, requires_grad=True)
    grad_BND = torch.randn_like(x_BND)

    def step(part: torch.nn.Module) -> Callable[[], object]:
        inputs = (x_BND, *part.parameters())

        def run() -> object:
            y = part(x_BND)
            y = y[0] if isinstance(y, tuple) else y
            return torch.autograd.grad(y, inputs, grad_BND)

        return run

    active = 2 * 3 * 1024 + sparse.n_experts
    return {name: step(part) for name, part in parts.items()}, active / (3 * 2048)


def models(
    fields: dict[str, Any], rows: int, seq_len: int
) -> tuple[dict[str, Callable[[], object]], float]:
    """One training step of each model without its optimizer, and the ratio of their active FLOPs."""
    ids = torch.randint(2, 32128, (rows, seq_len))
    runs: dict[str, Callable[[], object]] = {}
    flops = {}
    for name, extra in (('sparse', EXPERTS), ('dense', {'d_ff': 2048})):
        config = AsymLoopConfig(d_model=768, n_heads=6, **fields, **extra)
        model = AsymLoopForCausalLM(config).train()
        flops[name] = training_flops(config, rows, seq_len)

        def run(model: AsymLoopForCausalLM = model) -> None:
            model.zero_grad(set_to_none=True)
            model(ids, labels=ids).loss.backward()

        runs[name] = run
    return runs, flops['sparse'] / flops['dense']


def per_flop(times: Times, active: float) -> float:
    """Tokens per second per active FLOP of the sparse candidate, over the dense one's."""
    return 1 / (ratio(times, 'sparse', 'dense') * active)


def main() -> None:
    """Prints times and the named ratios."""
    command = parser(__doc__ or '')
    command.add_argument('--rows', type=int, default=2, help='sequences of a microbatch')
    command.add_argument('--seq-len', type=int, default=1024, help='tokens of a sequence')
    arguments = command.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = 1 if arguments.quick else arguments.rows
    seq_len = 512 if arguments.quick else arguments.seq_len
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    print_environment(clock=arguments.clock, rows=rows, seq_len=seq_len, rounds=rounds)

    ratios = {}
    measured = {'layer': layers(rows * seq_len)}
    for name, fields in SYSTEMS.items():
        if arguments.quick and name != 'asymloop':
            continue
        measured[name] = models(fields, rows, seq_len)
    for name, (runs, active) in measured.items():
        times = interleave(runs, rounds, clock=arguments.clock, label=name)
        print(f'{name}: active FLOPs x {active:.4f}')
        print_times(times, 'dense')
        ratios[f'{name}_tokens_per_active_flop'] = per_flop(times, active)
    print_ratios(ratios, arguments.json)


if __name__ == '__main__':
    main()
