# SPDX-License-Identifier: Apache-2.0
"""The paper's accuracies (Tables 1 and 2): lm-eval's seven tasks, with the paper's row beside ours."""

import json
import logging
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
from composer.utils import reproducibility
from lm_eval.utils import handle_non_serializable

from ..experiments.paper import ACCURACY_BY_SCALE, ACCURACY_COLUMNS, ARCHITECTURES
from ..experiments.results import TASKS as COLUMNS
from ..files import write_text
from ..models.configuration_asymloop import AsymLoopConfig
from .scorer import ContinuationScorer
from .tasks import TASKS, Source, find_sources, task_manager

__all__ = ['Row', 'accuracies', 'accuracy_table', 'evaluate', 'paper_row', 'result_path', 'write']

FEWSHOT_SEED = 1234
Row = tuple[str, str]


def evaluate(
    scorer: ContinuationScorer,
    tasks: Sequence[str] = tuple(TASKS),
    shots: int = 0,
    data: str | Path | None = None,
    limit: int | None = None,
    samples: Path | None = None,
) -> dict[str, Any]:
    """Runs tasks through lm-eval, one after the other so that one task's requests are held at a time.

    Random states are left as they were, so that this can run in the middle of training.

    Args:
        scorer: the model.
        tasks: lm-eval's names.
        shots: examples in each prompt.
        data: a folder of parquet in the hub's layout; without it the hub is asked.
        limit: score only so many rows of each task.
        samples: folder for a jsonl of every row's log-likelihoods, per task.

    Returns:
        lm-eval's results, with ``fewshot_source`` by task where there are examples.
    """
    logging.getLogger('lm_eval').setLevel(logging.ERROR)
    sources = None if data is None else find_sources(data, tasks)
    merged: dict[str, Any] = {}
    scorer.n_truncated = 0
    with _random_state_kept(), tempfile.TemporaryDirectory() as folder:
        manager = task_manager(tasks, folder, sources)
        for task in tasks:
            found = lm_eval.simple_evaluate(
                model=scorer,
                tasks=[task],
                num_fewshot=shots,
                task_manager=manager,
                limit=limit,
                log_samples=samples is not None,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
                fewshot_random_seed=FEWSHOT_SEED,
            )
            assert found is not None  # this scorer is rank 0 of 1 to lm-eval, on every rank
            rows = found.pop('samples', None)
            if samples is not None:
                _write_samples(samples / f'samples-{task}-{shots}shot.jsonl', rows[task])
            _merge(merged, found)
    if shots:
        merged['fewshot_source'] = {task: _source_of(task, sources) for task in tasks}
    merged['n_truncated'] = scorer.n_truncated
    return merged


def accuracies(results: Mapping[str, Any]) -> dict[str, float]:
    """Raw ``acc`` by task, a share of 1."""
    return {task: found['acc,none'] for task, found in results['results'].items()}


def result_path(folder: str | Path, shots: int, step: int | None = None) -> Path:
    """Where the JSON of an evaluation goes."""
    when = '' if step is None else f'-ba{step}'
    return Path(folder) / f'harness{when}-{shots}shot.json'


def write(path: Path, results: Mapping[str, Any], **facts: Any) -> None:
    """Writes lm-eval's JSON, with facts of ours beside its own keys, whole or not at all."""
    text = json.dumps(
        {**results, **facts}, indent=1, ensure_ascii=False, default=handle_non_serializable
    )
    write_text(path, text + '\n')


def paper_row(config: AsymLoopConfig) -> Row | None:
    """The paper's scale and system that a configuration is, or ``None``."""
    scales = [
        scale
        for scale, size in ARCHITECTURES.items()
        if (size.d_model, size.d_ff, size.n_heads, size.layers)
        == (config.d_model, config.d_ff, config.n_heads, config.num_hidden_layers)
    ]
    n_encoder, n_decoder = config.n_encoder_layers, config.n_decoder_layers
    if n_decoder == 0:
        system = 'dense'
    elif n_encoder == 0 and not config.global_kv and config.num_iterations > 1:
        system = 'full-loop'
    elif n_encoder == n_decoder and config.global_kv and config.local_kv:
        system = 'asymloop'
    else:
        return None
    return (scales[0], system) if scales else None


def accuracy_table(results: Mapping[str, Any], shots: int, row: Row | None) -> str:
    """Accuracy in per cent by task, with n, beside the paper's row (Table 1) where there is one."""
    ours = accuracies(results)
    paper = (
        dict(zip(ACCURACY_COLUMNS, ACCURACY_BY_SCALE[shots][row], strict=True))
        if (row is not None and shots in ACCURACY_BY_SCALE)
        else {}
    )
    title = f'{shots}-shot accuracy in % (lm-eval {lm_eval.__version__}, metric acc,none)'
    beside = f'paper {row[0]} {row[1]}' if row is not None and paper else 'paper'
    lines = [title, f'{"task":<14}{"n":>7}{"acc":>8}{beside:>22}{"difference":>12}']
    for column, task in COLUMNS.items():
        if task in ours:
            n = results['n-samples'][task]['effective']
            lines.append(_line(task, str(n), 100 * ours[task], paper.get(column)))
    complete = set(ours) == set(COLUMNS.values())
    mean = 100 * statistics.fmean(ours.values())
    lines.append(_line('mean', '', mean, paper.get('avg') if complete else None))
    for task, found in results['n-samples'].items():
        if found['effective'] < found['original']:
            lines.append(f'{task}: only the first {found["effective"]} of {found["original"]} rows')
    for task, source in results.get('fewshot_source', {}).items():
        lines.append(f'{task}: examples from the {source}')
    if results.get('n_truncated'):
        lines.append(
            f"{results['n_truncated']} prompts were longer than the model's context and lost their "
            'beginning'
        )
    return '\n'.join(lines)


def _line(name: str, n: str, ours: float, paper: float | None) -> str:
    beside = f'{"-":>22}{"":>12}' if paper is None else f'{paper:>22.2f}{ours - paper:>+12.2f}'
    return f'{name:<14}{n:>7}{ours:>8.2f}{beside}'


def _source_of(task: str, sources: Mapping[str, Source] | None) -> str:
    return 'train split of the hub' if sources is None else sources[task].describe()


def _merge(merged: dict[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key].update(value)
        else:
            merged[key] = value


def _write_samples(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(
        path,
        ''.join(
            json.dumps(row, ensure_ascii=False, default=handle_non_serializable) + '\n'
            for row in rows
        ),
    )


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """lm-eval draws from Python's generator even where no seed is given."""
    states = reproducibility.get_rng_state()
    try:
        yield
    finally:
        reproducibility.load_rng_state(states)
