# SPDX-License-Identifier: Apache-2.0
"""The paper's seven tasks as lm-eval defines them, from the hub or from local parquet."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

__all__ = ['TASKS', 'Source', 'Task', 'find_sources', 'task_manager']

SPLITS = ('train', 'validation', 'test')


@dataclass(frozen=True)
class Task:
    """Where a task is.

    Attributes:
        name: lm-eval's name.
        folder: below ``--data``, as the hub names data set and configuration.
        split: the split that is scored.
        rows: how many rows that split has.
        config: lm-eval's definition, below its folder of tasks.
    """

    name: str
    folder: str
    split: str
    rows: int
    config: str


# In the order of the paper's columns.
TASKS = {
    task.name: task
    for task in (
        Task('openbookqa', 'openbookqa/main', 'test', 500, 'openbookqa/openbookqa.yaml'),
        Task(
            'winogrande',
            'winogrande/winogrande_xl',
            'validation',
            1267,
            'winogrande/default.yaml',
        ),
        Task('arc_challenge', 'ai2_arc/ARC-Challenge', 'test', 1172, 'arc/arc_challenge.yaml'),
        Task('arc_easy', 'ai2_arc/ARC-Easy', 'test', 2376, 'arc/arc_easy.yaml'),
        Task('hellaswag', 'hellaswag', 'validation', 10042, 'hellaswag/hellaswag.yaml'),
        Task('social_iqa', 'social_i_qa', 'validation', 1954, 'siqa/siqa.yaml'),
        Task('piqa', 'piqa/plain_text', 'validation', 1838, 'piqa/piqa.yaml'),
    )
}


@dataclass(frozen=True)
class Source:
    """Local files of a task.

    Attributes:
        files: parquet files by split.
        examples: the split that few-shot examples come from.
        excludes_scored_row: whether that is the scored split, so that the scored row is left out.
    """

    files: Mapping[str, tuple[str, ...]]
    examples: str
    excludes_scored_row: bool

    def describe(self) -> str:
        """Where few-shot examples come from, in words."""
        rest = ', the scored row excluded' if self.excludes_scored_row else ''
        return f'{self.examples} split{rest}'


def find_sources(data: str | Path, names: Iterable[str]) -> dict[str, Source]:
    """Finds the tasks' splits below a folder in the hub's layout.

    Few-shot examples come from the training split, as lm-eval has it, where that is there; else from
    another split that is not scored; else from the scored one.

    Args:
        data: a folder with, for example, ``ai2_arc/ARC-Easy/test.parquet``.
        names: lm-eval's names of the tasks.

    Raises:
        FileNotFoundError: a task's scored split is missing.
    """
    sources = {}
    for name in names:
        task = TASKS[name]
        folder = Path(data).resolve() / task.folder
        files = {
            split: tuple(str(path) for path in sorted(folder.glob(f'{split}*.parquet')))
            for split in SPLITS
        }
        files = {split: paths for split, paths in files.items() if paths}
        if task.split not in files:
            raise FileNotFoundError(
                f'--data {data}: {name} is scored on {task.folder}/{task.split}*.parquet, which is '
                'not there; give a folder in the layout of the hub, or leave --data out to '
                'download.'
            )
        others = [split for split in SPLITS if split in files and split != task.split]
        examples = others[0] if others else task.split
        sources[name] = Source(files, examples, excludes_scored_row=examples == task.split)
    return sources


def task_manager(
    names: Iterable[str], folder: str | Path, sources: Mapping[str, Source] | None = None
) -> TaskManager:
    """lm-eval's manager for these tasks alone: reading all its definitions takes a minute.

    Args:
        names: lm-eval's names of the tasks.
        folder: an empty folder for their definitions, which include lm-eval's own.
        sources: local files, or ``None`` for the hub.

    Raises:
        ValueError: a name is none of the seven.
    """
    root = Path(lm_eval.__file__).parent / 'tasks'
    for name in names:
        if name not in TASKS:
            raise ValueError(f'task {name!r} is none of {", ".join(TASKS)}.')
        definition: dict[str, Any] = {'include': str(root / TASKS[name].config), 'task': name}
        if sources is not None:
            definition |= _local_definition(TASKS[name], sources[name])
        # JSON is YAML.
        (Path(folder) / f'{name}.yaml').write_text(json.dumps(definition), encoding='utf-8')
    return TaskManager(include_defaults=False, include_path=str(folder))


def _local_definition(task: Task, source: Source) -> dict[str, Any]:
    used = {task.split: source.files[task.split], source.examples: source.files[source.examples]}
    definition: dict[str, Any] = {
        'dataset_path': 'parquet',
        'dataset_name': None,
        'dataset_kwargs': {'data_files': {split: list(paths) for split, paths in used.items()}},
        'training_split': None,
        'validation_split': None,
        # lm-eval leaves the scored row out of the examples where both splits have the same name.
        'test_split': task.split,
        'fewshot_split': source.examples,
    }
    if source.examples == 'train':
        # Exactly lm-eval's own choice of examples: the hub's rows, other files.
        for key in ('test_split', 'fewshot_split', 'training_split', 'validation_split'):
            del definition[key]
    return definition
