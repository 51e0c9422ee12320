# SPDX-License-Identifier: Apache-2.0
"""What finished runs left behind, gathered into one file.

A run's folder holds ``results.json`` (the ``results_writer`` callback), and anywhere below it the JSON of
lm-eval (``python eval.py harness``) and of GSM8K scoring (``python eval.py gsm8k``).
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import RESULTS_FILE
from .runs import RUNS, SCALES

__all__ = ['TASKS', 'collect', 'load_results', 'values']

# lm-eval's names of the tasks, by the paper's columns.
TASKS = {
    'obqa': 'openbookqa',
    'winogrande': 'winogrande',
    'arc_challenge': 'arc_challenge',
    'arc_easy': 'arc_easy',
    'hellaswag': 'hellaswag',
    'siqa': 'social_iqa',
    'piqa': 'piqa',
}
CROSS_ENTROPY = 'LanguageCrossEntropy'
COPIED = (
    'seed',
    'finished',
    'steps',
    'samples',
    'tokens',
    'seconds',
    'seconds_per_step',
    'peak_gib',
    'device',
    'world_size',
    'versions',
    'config_sha256',
)

Record = dict[str, Any]


def collect(folders: Iterable[Path]) -> list[Record]:
    """One record per run found below the folders, in the order of the registry.

    Args:
        folders: run folders, or folders of run folders.

    Returns:
        Records with ``run``, ``scale``, ``seed``, ``ce``, ``parameters_millions``, cost, ``accuracy`` (by
        number of shots and task, in per cent), ``gsm8k`` (per cent) and ``trajectory`` where they exist,
        and ``source``, the file they come from.

    Raises:
        FileNotFoundError: a folder does not exist, or no run is below any.
        ValueError: a file is no results file, or two files claim the same run and seed.
    """
    records: dict[tuple[str, str, int], Record] = {}
    searched = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f'{folder} is no folder; give run folders, such as ./runs.')
        searched.append(str(folder))
        for path in sorted(folder.rglob(RESULTS_FILE)):
            record = _record(path)
            if record is None:
                continue
            key = (record['scale'], record['run'], record['seed'])
            if key in records and records[key]['source'] != record['source']:
                raise ValueError(
                    f'{path} and {records[key]["source"]} both hold {record["scale"]}/{record["run"]} '
                    f'with seed {record["seed"]}; give one of the two folders.'
                )
            records[key] = record
    if not records:
        raise FileNotFoundError(
            f'no {RESULTS_FILE} of a known run below {", ".join(searched)}; runs write it when their '
            'configuration has callbacks.results_writer with `experiment`.'
        )
    order = {name: i for i, name in enumerate(RUNS)}
    return sorted(records.values(), key=lambda r: (r['scale'], order[r['run']], r['seed']))


def load_results(path: Path) -> list[Record]:
    """Reads what ``collect`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is something else.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f'{path} does not exist; write it with `python -m asymloop_foundry.experiments collect '
            f'./runs -o {path}`.'
        )
    content = _read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get('runs'), list):
        raise ValueError(f'{path} was not written by `collect`: it has no list `runs`.')
    return content['runs']


def values(
    records: Sequence[Record], run: str, metric: str, scale: str = 'paper'
) -> dict[int, float]:
    """A metric of every finished seed of a run; the metrics are those of :class:`.tables.Cell`."""
    found = {}
    for record in records:
        if record['run'] == run and record['scale'] == scale and record['finished']:
            value = _metric(record, metric)
            if value is not None:
                found[record['seed']] = value
    return found


def _metric(record: Mapping[str, Any], metric: str) -> float | None:
    if metric.startswith('acc/'):
        _, task, shots = metric.split('/')
        by_task = record.get('accuracy', {}).get(shots, {})
        if task != 'avg':
            return by_task.get(task)
        if any(name not in by_task for name in TASKS):
            return None
        return statistics.fmean(by_task[name] for name in TASKS)
    return record.get(metric)


def _record(path: Path) -> Record | None:
    content = _read_json(path)
    if not isinstance(content, dict) or 'trajectory' not in content:
        raise ValueError(f'{path} was not written by the results_writer callback.')
    experiment = content.get('experiment') or ''
    scale, _, run = experiment.partition('/')
    if scale not in SCALES or run not in RUNS:
        return None
    record: Record = {'run': run, 'scale': scale, **{key: content[key] for key in COPIED}}
    record['parameters_millions'] = content['parameters'] / 1e6
    ce = _cross_entropy(content['metrics'])
    if ce is not None:
        record['ce'] = ce
    record['trajectory'] = [
        {'step': entry['step'], 'tokens': entry['tokens'], 'ce': entry['metrics'][CROSS_ENTROPY]}
        for entry in content['trajectory']
        if CROSS_ENTROPY in entry['metrics']
    ]
    record |= _scores(path.parent, content['steps'], RUNS[run].k)
    record['source'] = str(path)
    return record


def _cross_entropy(metrics: Mapping[str, Mapping[str, float]]) -> float | None:
    """CE of the validation loader; other evaluators are tasks of the gauntlet."""
    found = [values[CROSS_ENTROPY] for values in metrics.values() if CROSS_ENTROPY in values]
    return found[0] if len(found) == 1 else metrics.get('validation', {}).get(CROSS_ENTROPY)


def _scores(folder: Path, last_step: int, k: int) -> Record:
    """Scores of the JSON files below a run's folder: lm-eval's, and GSM8K's.

    Left out are those of another K than the run's, and of tasks of which only some rows were scored.
    """
    scores: Record = {}
    accuracy: dict[str, dict[str, float]] = {}
    along: dict[int, dict[str, dict[str, float]]] = {}
    for path in sorted(folder.rglob('*.json')):
        if path.name == RESULTS_FILE:
            continue
        content = _read_json(path)
        if not isinstance(content, dict) or content.get('num_iterations', k) != k:
            continue
        if content.get('task') == 'gsm8k' and 'strict_accuracy' in content:
            scores['gsm8k'] = 100 * content['strict_accuracy']
            scores['gsm8k_flexible'] = 100 * content['flexible_accuracy']
        for shots, by_task in _harness_accuracies(content).items():
            step = content.get('step', last_step)
            along.setdefault(step, {}).setdefault(shots, {}).update(by_task)
            if step == last_step:
                accuracy.setdefault(shots, {}).update(by_task)
    if accuracy:
        scores['accuracy'] = accuracy
    if len(along) > 1:
        scores['accuracy_along'] = [{'step': step, **along[step]} for step in sorted(along)]
    return scores


def _harness_accuracies(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Raw ``acc`` in per cent by number of shots and column, from lm-eval's JSON."""
    results = content.get('results')
    if not isinstance(results, dict):
        return {}
    found: dict[str, dict[str, float]] = {}
    for column, task in TASKS.items():
        score = results.get(task, {}).get('acc,none')
        rows = content.get('n-samples', {}).get(task, {})
        if score is not None and rows.get('effective') == rows.get('original'):
            shots = str(content.get('n-shot', {}).get(task, 0))
            found.setdefault(shots, {})[column] = 100 * score
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{path} is no JSON: {error}') from error
