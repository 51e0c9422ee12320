# SPDX-License-Identifier: Apache-2.0
"""Training throughput against LLM-Foundry's own models, at equal depth and width.

``llama`` is Foundry's ``hf_causal_lm`` around Hugging Face's Llama, ``mpt`` its ``mpt_causal_lm`` with
RoPE, RMSNorm and a gated FFN; both have the layers, widths, heads and vocabulary of ``dense``.
``asymloop`` has the same parameters in half the layers' worth of iteration (3 + 3, K = 3). Each step is
Composer's forward, loss and backward.

Models of different arithmetic are compared by what they get out of the machine: analytic FLOPs (causal
attention) per second. A ratio above 1 means that ours computes more in the same time.

    python benchmarks/against_foundry.py --threads 1 --clock cpu
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

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
from composer.models import ComposerModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from asymloop_foundry.models.composer_asymloop import ComposerAsymLoopCausalLM
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig
from asymloop_foundry.models.flops import training_flops

V = 32128


def tokenizer() -> PreTrainedTokenizerBase:
    """Names the special tokens; nothing is encoded."""
    words = Tokenizer(WordLevel({'<pad>': 0, '</s>': 1, '<unk>': 2}, unk_token='<unk>'))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token='<pad>', eos_token='</s>', unk_token='<unk>'
    )


def dimensions(args: object) -> dict[str, int]:
    return {'d_model': args.d_model, 'n_heads': args.n_heads, 'd_ff': args.d_ff}


def ours(args: object, **topology: object) -> AsymLoopConfig:
    return AsymLoopConfig(vocab_size=V, max_seq_len=args.length, **dimensions(args), **topology)


def llama(args: object) -> ComposerModel:
    from llmfoundry.models.hf.hf_causal_lm import ComposerHFCausalLM

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            vocab_size=V,
            hidden_size=args.d_model,
            intermediate_size=args.d_ff,
            num_hidden_layers=args.n_layers,
            num_attention_heads=args.n_heads,
            max_position_embeddings=args.length,
            tie_word_embeddings=False,
        ).save_pretrained(Path(folder))
        return ComposerHFCausalLM(
            tokenizer=tokenizer(),
            pretrained_model_name_or_path=folder,
            pretrained=False,
            use_train_metrics=False,
            attn_implementation='sdpa',
        )


def mpt(args: object) -> ComposerModel:
    from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM

    cuda = args.device == 'cuda'
    return ComposerMPTCausalLM(
        tokenizer=tokenizer(),
        use_train_metrics=False,
        loss_fn='torch_crossentropy',
        d_model=args.d_model,
        n_heads=args.n_heads,
        n_layers=args.n_layers,
        max_seq_len=args.length,
        vocab_size=V,
        no_bias=True,
        norm_type='rmsnorm',
        learned_pos_emb=False,
        tie_word_embeddings=False,
        ffn_config={'ffn_type': 'mptglu', 'ffn_hidden_size': args.d_ff},
        attn_config={
            'attn_impl': 'flash' if cuda else 'torch',
            'rope': True,
            'rope_impl': 'hf',
            'rope_hf_config': {'type': 'no_scaling', 'factor': 1.0},
        },
    )


def step(model: ComposerModel, tokens: torch.Tensor, args: object) -> Callable[[], object]:
    model = model.to(args.device).train()
    batch = {'input_ids': tokens, 'labels': tokens}
    if args.masked:
        batch['attention_mask'] = torch.ones_like(tokens, dtype=torch.bool)

    def run() -> None:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            loss = model.loss(model(batch), batch)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument('--batch', type=int, default=1)
    arguments.add_argument('--length', type=int, default=1024)
    arguments.add_argument('--d-model', type=int, default=768)
    arguments.add_argument('--n-heads', type=int, default=6)
    arguments.add_argument('--d-ff', type=int, default=2048)
    arguments.add_argument('--n-layers', type=int, default=6)
    arguments.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    arguments.add_argument('--bf16', action='store_true', help='under bf16 autocast')
    arguments.add_argument(
        '--masked', action='store_true', help="give Foundry's models an attention mask of ones"
    )
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rounds = args.rounds = args.rounds or (1 if args.quick else 7)
    print_environment(args)
    half = args.n_layers // 2
    configs = {
        'dense': ours(args, n_encoder_layers=args.n_layers, n_decoder_layers=0, num_iterations=1),
        'asymloop': ours(
            args, n_encoder_layers=args.n_layers - half, n_decoder_layers=half, num_iterations=3
        ),
    }
    models: dict[str, ComposerModel] = {'llama': llama(args), 'mpt': mpt(args)}
    for name, config in configs.items():
        keys = AsymLoopConfig.keys() & config.to_diff_dict().keys()
        models[name] = ComposerAsymLoopCausalLM(**{k: getattr(config, k) for k in keys})
    for name, model in models.items():
        print(f'  {name}: {sum(p.numel() for p in model.parameters()):,} parameters')
    tokens = torch.randint(3, V, (args.batch, args.length), device=args.device)
    steps = {name: step(model, tokens, args) for name, model in models.items()}
    times = interleave(steps, rounds, clock=args.clock, device=args.device, label='step')
    memory = {name: peak_extra_bytes(run, args.device) for name, run in steps.items()}
    print_times(times, 'dense', memory=memory)
    flops = {
        name: training_flops(config, args.batch, args.length, causal=True)
        for name, config in configs.items()
    }
    flops |= dict.fromkeys(('llama', 'mpt'), flops['dense'])
    ratios: dict[str, float] = {}
    for name in configs:
        for other in ('llama', 'mpt'):
            work = flops[name] / flops[other]
            ratios[f'{name}_vs_{other}'] = work / ratio(times, name, other)
            ratios[f'{name}_memory_over_{other}'] = memory[name] / memory[other]
    print_ratios(ratios, args.json)


if __name__ == '__main__':
    main()
