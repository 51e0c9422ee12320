# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with the cache, against transformers' LLaMA of the same width and effective depth.

A LLaMA of 12 layers and looped members that call 12 layers a token (E + K D = 12), all of them with
``generate`` in fp32, one row, from a cache that already holds the context: no prefill is timed. Weights
are random, which changes no time. Bytes of cache are counted in the caches themselves; the Dense
equivalent is the LLaMA's.

    python benchmarks/decoding.py --threads 1 --clock cpu
"""

from collections.abc import Callable

import torch
import transformers
from common import interleave, parser, print_environment, print_ratios, print_times, ratio
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.modeling_asymloop import AsymLoopForCausalLM

VOCABULARY = 32128
LAYERS = 12
MEMBERS = {
    'asymloop': {'n_encoder_layers': 3, 'n_decoder_layers': 3, 'num_iterations': 3},
    'asymloop_qk_norm': {
        'n_encoder_layers': 3,
        'n_decoder_layers': 3,
        'num_iterations': 3,
        'qk_norm': 'decoder',
    },
    'dense': {'n_encoder_layers': LAYERS, 'n_decoder_layers': 0, 'num_iterations': 1},
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument('--context', type=int, default=512, help='cached positions')
    arguments.add_argument('--new-tokens', type=int, default=32)
    arguments.add_argument('--d-model', type=int, default=768, help='the default is the 60M one')
    arguments.add_argument('--n-heads', type=int, default=6)
    arguments.add_argument('--d-ff', type=int, default=2048)
    arguments.add_argument('--batch', type=int, default=1)
    arguments.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rounds = args.rounds = args.rounds or (3 if args.quick else 9)
    print_environment(args, transformers=transformers.__version__)
    shape = {
        'vocab_size': VOCABULARY,
        'max_position_embeddings': args.context + args.new_tokens + 1,
    }
    models: dict[str, PreTrainedModel] = {
        'llama': LlamaForCausalLM(
            LlamaConfig(
                hidden_size=args.d_model,
                num_attention_heads=args.n_heads,
                intermediate_size=args.d_ff,
                num_hidden_layers=LAYERS,
                **shape,
            )
        )
    }
    for name, fields in MEMBERS.items():
        config = AsymLoopConfig(
            d_model=args.d_model, n_heads=args.n_heads, d_ff=args.d_ff, **shape, **fields
        )
        models[name] = AsymLoopForCausalLM(config)
    ids = torch.randint(3, 32000, (args.batch, args.context + 1), device=args.device)
    runs, cache_bytes = {}, {}
    for name, model in models.items():
        runs[name], cache_bytes[name] = generation(model.to(args.device).eval(), ids, args)
    times = interleave(runs, rounds, clock=args.clock, device=args.device, label='generation')
    print_times(times, 'llama')
    ratios: dict[str, float] = {}
    for name in models:
        seconds = sorted(times[name])[rounds // 2]
        speed = args.batch * args.new_tokens / seconds
        print(f'  {name}: {speed:.1f} tokens/s, {cache_bytes[name]:,} bytes of cache per token')
        if name != 'llama':
            ratios[f'{name}_tokens_per_second_over_llama'] = 1 / ratio(times, name, 'llama')
            ratios[f'{name}_cache_bytes_over_llama'] = cache_bytes[name] / cache_bytes['llama']
    ratios['tokens_per_second_vs_llama'] = ratios['asymloop_tokens_per_second_over_llama']
    for name in ('asymloop', 'llama'):
        ratios['cache_bytes_per_token' + ('_dense' if name == 'llama' else '')] = cache_bytes[name]
    print_ratios(ratios, args.json)


def generation(
    model: PreTrainedModel, ids: Tensor, args: object
) -> tuple[Callable[[], object], int]:
    """A run that generates behind the cached context, and the cache's bytes for one token."""
    n_past = ids.shape[1] - 1
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :n_past], past_key_values=cache, use_cache=True, logits_to_keep=1)
    n_bytes = sum(x.nbytes for slot in cache for x in slot) // (n_past * ids.shape[0])

    def run() -> Tensor:
        cache.crop(n_past)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    return run, n_bytes


if __name__ == '__main__':
    main()
