# SPDX-License-Identifier: Apache-2.0
"""Joint attention against what it replaces, forward plus backward.

- ``joint``: this package's operator.
- ``floor``: two independent causal calls on the same tensors, which do all its arithmetic and return
  no joint result.
- ``masked_bool``, ``masked_float``: ``scaled_dot_product_attention`` over 2N keys with a mask.
- ``flex``: ``flex_attention`` with the equivalent mask function, on a GPU only: on a CPU torch 2.7
  does not train through it, and its threaded code does not compile.

    python benchmarks/joint_attention.py --threads 1 --clock cpu
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import (
    Times,
    interleave,
    parser,
    peak_extra_bytes,
    print_environment,
    print_ratios,
    print_times,
    ratio,
)
from torch import Tensor

from asymloop_foundry.models.joint_attention import joint_attention

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16}


def make_tensors(
    batch: int, heads: int, n: int, width: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k_global, v_global, k_local, v_local and the upstream gradient, laid out (B, N, H, d)."""
    return [
        torch.randn(batch, n, heads, width, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_(i < 5)
        for i in range(6)
    ]


def candidates(tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    q, kg, vg, kl, vl, grad = tensors
    leaves = (q, kg, vg, kl, vl)
    n = q.shape[2]
    causal_NN = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    mask_bool = torch.cat((causal_NN, causal_NN), dim=1)
    mask_float = torch.zeros_like(mask_bool, dtype=q.dtype).masked_fill(~mask_bool, float('-inf'))

    def joint() -> object:
        return torch.autograd.grad(joint_attention(*leaves), leaves, grad)

    def floor() -> object:
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True) for k, v in ((kg, vg), (kl, vl))
        ]
        return torch.autograd.grad(outs, leaves, (grad, grad))

    def masked(mask: Tensor) -> object:
        out = F.scaled_dot_product_attention(
            q, torch.cat((kg, kl), dim=2), torch.cat((vg, vl), dim=2), attn_mask=mask
        )
        return torch.autograd.grad(out, leaves, grad)

    result: dict[str, Callable[[], object]] = {
        'floor': floor,
        'joint': joint,
        'masked_bool': lambda: masked(mask_bool),
        'masked_float': lambda: masked(mask_float),
    }
    if q.device.type == 'cuda':
        result['flex'] = flex(leaves, grad)
    return result


def flex(leaves: tuple[Tensor, ...], grad: Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, kg, vg, kl, vl = leaves
    n = q.shape[2]
    blocks = create_block_mask(
        lambda b, h, qi, ki: ki % n <= qi, None, None, n, 2 * n, device=q.device.type
    )
    compiled = torch.compile(flex_attention)

    def run() -> object:
        out = compiled(q, torch.cat((kg, kl), dim=2), torch.cat((vg, vl), dim=2), block_mask=blocks)
        return torch.autograd.grad(out, leaves, grad)

    return run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument('--batch', type=int, default=1)
    arguments.add_argument('--heads', type=int, default=6)
    arguments.add_argument('--width', type=int, default=128, help='head width')
    arguments.add_argument('--lengths', type=int, nargs='+', default=[1024, 2048])
    arguments.add_argument('--dtypes', choices=DTYPES, nargs='+', default=['fp32'])
    arguments.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rounds = args.rounds = args.rounds or (5 if args.quick else 15)
    print_environment(args)
    ratios: dict[str, float] = {}
    memory_of_joint: dict[tuple[str, int], int] = {}
    for dtype in args.dtypes:
        for n in args.lengths:
            tensors = make_tensors(
                args.batch, args.heads, n, args.width, DTYPES[dtype], args.device
            )
            runs = candidates(tensors)
            times: Times = interleave(
                runs, rounds, clock=args.clock, device=args.device, label=f'{dtype} N={n}'
            )
            memory = {name: peak_extra_bytes(run, args.device) for name, run in runs.items()}
            memory_of_joint[dtype, n] = memory['joint']
            print(f'{dtype}, N = {n}')
            print_times(times, 'floor', memory=memory)
            masked = min(
                ('masked_bool', 'masked_float'), key=lambda name: ratio(times, name, 'floor')
            )
            suffix = f'{dtype}_{n}'
            ratios[f'vs_floor_{suffix}'] = ratio(times, 'joint', 'floor')
            ratios[f'vs_masked_sdpa_{suffix}'] = ratio(times, masked, 'joint')
            if 'flex' in runs:
                ratios[f'vs_flex_{suffix}'] = ratio(times, 'flex', 'joint')
    # The headline numbers are those of fp32, or of the only dtype measured.
    dtype = args.dtypes[0]
    ratios['vs_floor'] = max(ratios[f'vs_floor_{dtype}_{n}'] for n in args.lengths)
    for n in args.lengths:
        ratios[f'vs_masked_sdpa_{n}'] = ratios[f'vs_masked_sdpa_{dtype}_{n}']
    short, long = min(args.lengths), max(args.lengths)
    if long > short:
        growth = memory_of_joint[dtype, long] / memory_of_joint[dtype, short]
        ratios['memory_growth_over_length_growth'] = growth / (long / short)
    print_ratios(ratios, args.json)


if __name__ == '__main__':
    main()
