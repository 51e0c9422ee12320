# SPDX-License-Identifier: Apache-2.0
"""The chunked loss against full logits, forward plus backward: time and peak memory.

- ``full``: ``F.linear``, then ``F.cross_entropy`` of fp32 logits, as Hugging Face models do.
- ``chunked``: this package's operator.

Both return the gradients of the hidden states and of the head.

    python benchmarks/cross_entropy.py --threads 1 --clock cpu
"""

import torch
import torch.nn.functional as F
from common import (
    interleave,
    parser,
    peak_extra_bytes,
    print_environment,
    print_ratios,
    print_times,
    ratio,
)

from asymloop_foundry.models.cross_entropy import linear_cross_entropy


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument('--batch', type=int, default=4)
    arguments.add_argument('--length', type=int, default=1024)
    arguments.add_argument('--d-model', type=int, default=768)
    arguments.add_argument('--vocab-size', type=int, default=32128)
    arguments.add_argument('--chunk-size', type=int, default=256)
    arguments.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    arguments.add_argument('--bf16', action='store_true', help='under bf16 autocast')
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rounds = args.rounds = args.rounds or (2 if args.quick else 5)
    shape = (args.batch, args.length)
    x = torch.randn(*shape, args.d_model, device=args.device, requires_grad=True)
    weight = torch.randn(args.vocab_size, args.d_model, device=args.device).mul_(0.02)
    weight.requires_grad_()
    labels = torch.randint(args.vocab_size, shape, device=args.device)

    def gradients(loss: torch.Tensor) -> object:
        return torch.autograd.grad(loss, (x, weight))

    def full() -> object:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            logits = F.linear(x, weight).float()
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return gradients(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    def chunked() -> object:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            loss = linear_cross_entropy(x, weight, labels, chunk_size=args.chunk_size)
        return gradients(loss)

    print_environment(args)
    runs = {'full': full, 'chunked': chunked}
    times = interleave(runs, rounds, clock=args.clock, device=args.device)
    memory = {name: peak_extra_bytes(run, args.device) for name, run in runs.items()}
    print_times(times, 'full', memory=memory)
    print_ratios(
        {
            'time_over_full': ratio(times, 'chunked', 'full'),
            'full_memory_over_chunked': memory['full'] / memory['chunked'],
        },
        args.json,
    )


if __name__ == '__main__':
    main()
