# SPDX-License-Identifier: Apache-2.0
"""From a Composer checkpoint to a folder that transformers loads without this package.

    python -m asymloop_foundry.export CHECKPOINT OUT [--dtype bf16] [--num-iterations 5]

The folder holds weights (safetensors), the model's own code, the configuration that points to it, the
tokenizer and the generation defaults.
"""

import argparse
import copy
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from asymloop_foundry.evaluation.loading import load, local_copy
from asymloop_foundry.evaluation.tokenizers import without_special_tokens
from asymloop_foundry.models.configuration_asymloop import AsymLoopConfig

__all__ = ['DTYPES', 'export', 'main', 'portable', 'portable_tokenizer', 'save']

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def export(
    checkpoint: str,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    num_iterations: int | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Writes one checkpoint as a folder for ``AutoModelForCausalLM.from_pretrained``.

    Nothing is unpickled beyond tensors, plain values and what Composer puts beside them.

    Args:
        checkpoint: Composer's ``.pt`` file (also at ``s3://``, ``gs://`` or ``oci://``), the folder of
            a sharded checkpoint on this machine, or an exported folder.
        out: the new folder; it must not exist.
        dtype: of the weights; training's checkpoints are fp32.
        num_iterations: K that the folder runs by default, where it should not be the training's.
        tokenizer: a folder or hub name, where the checkpoint has none.

    Returns:
        The folder.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError: there is no checkpoint.
        ValueError: it is none of ours, or cannot run ``num_iterations``.
    """
    out = Path(out)
    _refuse_existing(out)
    with local_copy(checkpoint) as path:
        loaded = load(path, tokenizer, num_iterations, dtype=dtype)
        return save(loaded.model, loaded.tokenizer, out)


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, out: str | Path
) -> Path:
    """Writes a model of the family, whole or not at all.

    Args:
        model: on any device, in the dtype to be kept.
        tokenizer: goes beside it, without a template that adds special tokens to a text.
        out: the new folder; it must not exist.

    Raises:
        FileExistsError: ``out`` exists.
    """
    out = Path(out)
    _refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f'.{out.name}.', dir=out.parent))
    kept = model.config, model.generation_config
    try:
        model.config = portable(model.config)
        model.generation_config = GenerationConfig(
            pad_token_id=model.config.pad_token_id, eos_token_id=model.config.eos_token_id
        )
        model.save_pretrained(temporary)
        if tokenizer is not None:
            portable_tokenizer(tokenizer).save_pretrained(temporary)
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.rename(out)
    finally:
        model.config, model.generation_config = kept
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def portable(config: AsymLoopConfig) -> AsymLoopConfig:
    """A copy without what belongs to the training's machine: attention kernel and recomputation."""
    config = copy.deepcopy(config)
    config.attn_backend = 'auto'
    config.activation_checkpointing = False
    config.use_cache = True
    return config


def portable_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """One that adds nothing to a text, and gives a model only what it takes.

    The generic tokenizer class gives ``token_type_ids`` unless told otherwise, and ``generate`` refuses
    what a model does not take.
    """
    tokenizer = copy.deepcopy(without_special_tokens(tokenizer))
    tokenizer.model_input_names = ['input_ids', 'attention_mask']
    tokenizer.init_kwargs['model_input_names'] = tokenizer.model_input_names
    return tokenizer


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise FileExistsError(f'{out} exists; give a new folder, or remove this one first.')


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog='python -m asymloop_foundry.export',
        description='Write a Composer checkpoint as a folder that transformers loads by itself.',
    )
    parser.add_argument('checkpoint', help='a .pt file (or its URI), or a sharded checkpoint')
    parser.add_argument('out', help='the new folder')
    parser.add_argument(
        '--dtype', choices=DTYPES, default='fp32', help='of the weights (%(default)s)'
    )
    parser.add_argument('--num-iterations', type=int, metavar='K', help="instead of the training's")
    parser.add_argument('--tokenizer', help='a folder or hub name, where the checkpoint has none')
    args = parser.parse_args(arguments)
    try:
        out = export(
            args.checkpoint,
            args.out,
            dtype=DTYPES[args.dtype],
            num_iterations=args.num_iterations,
            tokenizer=args.tokenizer,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(
        f'{out}: AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True) loads it.'
    )


if __name__ == '__main__':
    main()
