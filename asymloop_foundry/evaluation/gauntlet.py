# SPDX-License-Identifier: Apache-2.0
"""Foundry's own evaluation of the seven tasks, set up from a checkpoint alone."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from llmfoundry.command_utils.eval import evaluate
from omegaconf import OmegaConf

from ..files import write_json
from ..models.configuration_asymloop import AsymLoopConfig
from .loading import checkpoint_config, checkpoint_tokenizer, read_checkpoint

__all__ = ['gauntlet_config', 'run_gauntlet']

METRIC = 'InContextLearningMultipleChoiceAccuracy'


def run_gauntlet(config: dict[str, Any], out: str | Path) -> dict[str, Any]:
    """Evaluates, prints Foundry's tables and writes ``gauntlet.json``.

    Args:
        config: what :func:`gauntlet_config` made.
        out: folder for the file.

    Returns:
        Accuracy by task and shots, and the gauntlet's mean.
    """
    with _scratch_folder():
        trainers, composite = evaluate(OmegaConf.create(config))
    state = trainers[0].state
    results = {
        'metric': METRIC,
        'accuracy': {
            label: float(metrics[METRIC].compute())
            for label, metrics in state.eval_metrics.items()
            if METRIC in metrics
        },
        'mean': _mean(composite),
        'model': config['models'][0]['model_name'],
    }
    write_json(Path(out) / 'gauntlet.json', results)
    return results


def gauntlet_config(
    checkpoint: str | Path,
    data: str | Path,
    yamls: str | Path,
    tokenizer_folder: str | Path,
    tokenizer: str | None = None,
    shots: Sequence[int] = (0,),
    num_iterations: int | None = None,
    batch_size: int = 16,
    precision: str = 'fp32',
    n_batches: int = -1,
    max_length: int | None = None,
) -> dict[str, Any]:
    """The configuration that ``llmfoundry eval`` would be given for this checkpoint.

    Args:
        checkpoint: a Composer checkpoint or an exported folder.
        data: folder of task files, as ``data_prep/convert_icl.py`` writes.
        yamls: folder of ``icl_tasks.yaml`` and ``eval_gauntlet.yaml``.
        tokenizer_folder: where the checkpoint's tokenizer may be written.
        tokenizer: a folder or hub name, where the checkpoint has none.
        shots: numbers of examples in the prompt.
        num_iterations: K, where it should differ from the configuration's.
        batch_size: rows per forward pass.
        precision: Composer's name of it.
        n_batches: batches of each task; -1 for all.
        max_length: positions of a prompt with its choice; by default the model's.

    Raises:
        FileNotFoundError: a task file is missing.
        ValueError: no tokenizer is known.
    """
    path = Path(checkpoint).resolve()
    entry: dict[str, Any] = {'model_name': path.parent.parent.name or path.name}
    if path.is_dir():
        model_config = AsymLoopConfig.from_pretrained(path)
        entry['model_name'] = path.name
        entry['model'] = {
            'name': 'hf_causal_lm',
            'pretrained_model_name_or_path': str(path),
            'pretrained': True,
            'trust_remote_code': True,
        }
        if num_iterations is not None:
            entry['model']['config_overrides'] = {'num_iterations': num_iterations}
        name = tokenizer or str(path)
    else:
        state = read_checkpoint(path)
        model_config = checkpoint_config(state)
        fields = {key: getattr(model_config, key) for key in sorted(AsymLoopConfig.field_names())}
        if num_iterations is not None:
            fields['num_iterations'] = model_config.check_iterations(num_iterations)
        entry['model'] = {'name': 'asymloop_causal_lm', **fields}
        entry['load_path'] = str(path)
        name = tokenizer or _kept_tokenizer(state, path, tokenizer_folder)
    n_positions = max_length or model_config.max_seq_len
    entry['tokenizer'] = {'name': name, 'kwargs': {'model_max_length': n_positions}}

    tasks = _yaml(Path(yamls) / 'icl_tasks.yaml')['icl_tasks']
    gauntlet = _yaml(Path(yamls) / 'eval_gauntlet.yaml')['eval_gauntlet']
    for task in tasks:
        file = Path(data).resolve() / Path(task['dataset_uri']).name
        if not file.is_file():
            raise FileNotFoundError(
                f'{file} does not exist; write it with `python data_prep/convert_icl.py --out {data}`.'
            )
        task |= {'dataset_uri': str(file), 'num_fewshot': list(shots)}
    categories = gauntlet['categories']
    for category in categories:
        category['benchmarks'] = [
            {**benchmark, 'num_fewshot': n} for n in shots for benchmark in category['benchmarks']
        ]
    return {
        'max_seq_len': n_positions,
        'seed': 6198,
        'precision': precision,
        'device_eval_batch_size': batch_size,
        'icl_subset_num_batches': n_batches,
        'python_log_level': 'warning',
        'log_config': False,
        'models': [entry],
        'icl_tasks': tasks,
        'eval_gauntlet': gauntlet,
    }


def _kept_tokenizer(state: dict[str, Any], path: Path, folder: str | Path) -> str:
    tokenizer = checkpoint_tokenizer(state)
    if tokenizer is None:
        raise ValueError(f'{path} carries no tokenizer; name it with --tokenizer.')
    tokenizer.save_pretrained(folder)
    return os.fspath(folder)


def _mean(composite: pd.DataFrame | None) -> float | None:
    return None if composite is None else float(composite['mean'].iloc[0])


def _yaml(path: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]


@contextmanager
def _scratch_folder() -> Iterator[None]:
    """A working folder for a while: Foundry links each task file into the one it is in."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
