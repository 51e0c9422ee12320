# SPDX-License-Identifier: Apache-2.0
"""The whole job at a toy size, on a machine with nothing but Python: ``python -m asymloop_foundry.quickstart``.

Text that every Python carries, a tokenizer trained on the spot, shards, pretraining of AsymLoop-tiny,
validation before and after, and a sample.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Before torch: one process on a small machine, and nothing that looks for a network.
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('WANDB_MODE', 'disabled')

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 'Return the number of'


def train_tokenizer(texts: Path, folder: Path, vocab_size: int) -> None:
    """Trains a byte-level BPE with its own end and padding tokens, and saves it for transformers.

    Args:
        texts: jsonl with a ``text`` column.
        folder: where ``tokenizer.json`` and its configuration go.
        vocab_size: entries, special tokens included.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=['<pad>', '</s>'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    with open(texts, encoding='utf-8') as lines:
        tokenizer.train_from_iterator((json.loads(line)['text'] for line in lines), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', eos_token='</s>'
    ).save_pretrained(folder)


def sample(model: Any, tokenizer: Any, prompt: str, new_tokens: int = 40) -> str:
    """Continues a prompt by sampling with a fixed seed."""
    import torch

    inputs = tokenizer(prompt, return_tensors='pt')
    torch.manual_seed(0)
    ids = model.generate(
        inputs['input_ids'],
        attention_mask=inputs['attention_mask'],
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=0.8,
        top_k=40,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def _say(message: str) -> None:
    print(f'\n==> {message}', flush=True)


def main(argv: list[str] | None = None) -> None:
    """Runs the five steps below ``--out``; finished ones are not done again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=Path('runs/quickstart'), help='working folder')
    parser.add_argument(
        'overrides', nargs='*', help='key=value for the YAML, for example max_duration=20ba'
    )
    args = parser.parse_args(argv)
    out: Path = args.out
    started = time.monotonic()
    train_text, val_text = out / 'text' / 'train.jsonl', out / 'text' / 'val.jsonl'

    _say(f'1/5 English text from the documentation that Python carries -> {out / "text"}')
    if not (train_text.exists() and val_text.exists()):
        from asymloop_foundry.data.builtin_text import write_builtin_text

        write_builtin_text(train_text, val_text)

    _say(f'2/5 A 4,096-entry tokenizer trained on it -> {out / "tokenizer"}')
    if not (out / 'tokenizer' / 'tokenizer.json').exists():
        train_tokenizer(train_text, out / 'tokenizer', 4096)

    _say(f'3/5 Streaming shards of 128-token rows -> {out / "data"}')
    convert: list[str | Path] = [
        sys.executable,
        ROOT / 'data_prep' / 'convert_fineweb.py',
        '--out',
        out / 'data',
    ]
    convert += ['--train', train_text, '--val', val_text, '--tokenizer', out / 'tokenizer']
    convert += ['--seq-len', '128', '--row-format', 'packed']
    subprocess.run(convert, check=True)

    _say(f'4/5 Pretraining AsymLoop-tiny with Composer -> {out / "checkpoints"}')
    from llmfoundry.command_utils import train_from_yaml

    yaml = str(ROOT / 'yamls' / 'asymloop-tiny.yaml')
    trainer = train_from_yaml(yaml, [f'variables.work_dir={out}', *args.overrides])

    _say('5/5 Results')
    results = json.loads((out / 'results.json').read_text())
    for when, entry in (('before', results['trajectory'][0]), ('after', results['trajectory'][-1])):
        loss = entry['metrics']['LanguageCrossEntropy']
        print(
            f'validation cross-entropy {when} training: {loss:.3f} '
            f'(perplexity {math.exp(loss):,.1f}, step {entry["step"]})'
        )
    model = trainer.state.model
    print(f'sample: {sample(model.model.eval(), model.tokenizer, PROMPT)!r}')
    print(
        f'checkpoint: {out / "checkpoints" / "latest-rank0.pt"}\n'
        f'metrics:    {out / "results.json"}\n'
        f'{time.monotonic() - started:.0f} seconds in all. The same YAML keys train the real models: '
        'composer train.py yamls/asymloop-350m.yaml'
    )
    trainer.close()


if __name__ == '__main__':
    main()
