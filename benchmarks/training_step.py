# SPDX-License-Identifier: Apache-2.0
"""One training step (forward, loss, backward) of Dense, Full Loop and AsymLoop, against its arithmetic.

The paper's 60M dimensions: d = 768, 6 heads, SwiGLU 2,048, V = 32,128, N = 1,024; Dense runs 6 layers
once, Full Loop runs 6 layers twice, AsymLoop 3 layers once and 3 layers three times, these with QKNorm.
The analytic ratios count matrix products with full and with causal attention. No optimizer step is
timed: it depends on the parameters, which are all but equal. With ``--profile``, where the time of a
step goes.

    python benchmarks/training_step.py --threads 1 --clock cpu
"""

from collections.abc import Callable

import torch
from common import (
    interleave,
    parser,
    peak_extra_bytes,
    print_environment,
    print_ratios,
    print_times,
    ratio,
)
from torch.profiler import ProfilerActivity, profile

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.flops import parameter_count, training_flops
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

SYSTEMS = {
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
    'dense': {'n_encoder_layers': 6, 'n_decoder_layers': 0, 'num_iterations': 1},
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument('--batch', type=int, default=1)
    arguments.add_argument('--length', type=int, default=1024)
    arguments.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    arguments.add_argument('--bf16', action='store_true', help='under bf16 autocast')
    arguments.add_argument('--checkpointing', action='store_true', help='recompute layer calls')
    arguments.add_argument('--compile', action='store_true', help='compile each model')
    arguments.add_argument('--systems', nargs='+', choices=SYSTEMS, default=list(SYSTEMS))
    arguments.add_argument('--profile', action='store_true', help='also print where time goes')
    args = arguments.parse_args()
    if 'full_loop' not in args.systems:
        arguments.error('--systems needs full_loop, to which the others are compared')
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rounds = args.rounds = args.rounds or (1 if args.quick else 7)
    print_environment(args)
    configs = {
        name: AsymLoopConfig(
            d_model=768,
            n_heads=6,
            d_ff=2048,
            max_seq_len=args.length,
            activation_checkpointing=args.checkpointing,
            **SYSTEMS[name],
        )
        for name in args.systems
    }
    tokens = torch.randint(32000, (args.batch, args.length), device=args.device)
    steps = {name: step(config, tokens, args) for name, config in configs.items()}
    times = interleave(steps, rounds, clock=args.clock, device=args.device, label='step')
    memory = {name: peak_extra_bytes(run, args.device) for name, run in steps.items()}
    print_times(times, 'full_loop', memory=memory)
    ratios: dict[str, float] = {}
    for name, config in configs.items():
        print(f'  {name}: {parameter_count(config):,} parameters')
        if name == 'full_loop':
            continue
        ratios[f'{name}_over_full_loop'] = ratio(times, name, 'full_loop')
        for kind, causal in (('full', False), ('causal', True)):
            own, base = (
                training_flops(
                    c, args.batch, args.length, causal=causal, recompute=args.checkpointing
                )
                for c in (config, configs['full_loop'])
            )
            ratios[f'{name}_over_full_loop_arithmetic_{kind}_attention'] = own / base
        ratios[f'{name}_memory_over_full_loop'] = memory[name] / memory['full_loop']
    if args.profile:
        for name, run in steps.items():
            print_profile(name, run)
    print_ratios(ratios, args.json)


def step(config: AsymLoopConfig, tokens: torch.Tensor, args: object) -> Callable[[], object]:
    model = AsymLoopForCausalLM(config).to(args.device).train()
    if args.compile:
        model.compile()

    def run() -> None:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def print_profile(name: str, run: Callable[[], object]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    events = sorted(record.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    print(f'{name}: self time of the operators, {total / 1e3:.0f} ms')
    for event in events[:16]:
        share = 100 * event.self_cpu_time_total / total
        print(f'  {event.key:<60} {share:5.1f} %  x {event.count}')


if __name__ == '__main__':
    main()
