# SPDX-License-Identifier: Apache-2.0
"""Task files of Foundry's gauntlet, written from the hub's rows.

Foundry's own copies have wrong golds in ARC and a two-way Social IQa; these have the data set's own
choices and golds, and the prompts of lm-eval. Delimiters between query and choice belong to the task's
YAML (``yamls/eval/icl_tasks.yaml``).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tqdm import tqdm

from ..files import write_text

__all__ = ['ICL_TASKS', 'IclTask', 'convert', 'read_rows', 'write_tasks']

Row = Mapping[str, Any]


def _question_with_letters(row: Row) -> dict[str, Any]:
    labels = list(row['choices']['label'])
    return {
        'query': f'Question: {row["question"]}',
        'choices': list(row['choices']['text']),
        # Labels are A to E or 1 to 5, and the key is one of the row's own.
        'gold': labels.index(row['answerKey']),
    }


def _openbook(row: Row) -> dict[str, Any]:
    labels = list(row['choices']['label'])
    return {
        'query': row['question_stem'],
        'choices': list(row['choices']['text']),
        'gold': labels.index(row['answerKey'].strip()),
    }


def _piqa(row: Row) -> dict[str, Any]:
    return {
        'query': f'Question: {row["goal"]}',
        'choices': [row['sol1'], row['sol2']],
        'gold': int(row['label']),
    }


def _social(row: Row) -> dict[str, Any]:
    return {
        'query': f'Q: {row["context"]} {row["question"]}',
        'choices': [row['answerA'], row['answerB'], row['answerC']],
        'gold': int(row['label']) - 1,
    }


def _winogrande(row: Row) -> dict[str, Any]:
    before, after = row['sentence'].split('_', 1)
    return {
        'context_options': [before + row['option1'], before + row['option2']],
        'continuation': after.strip(),
        'gold': int(row['answer']) - 1,
    }


def _hellaswag(row: Row) -> dict[str, Any]:
    context = f'{row["activity_label"]}: {row["ctx_a"]} {row["ctx_b"].capitalize()}'
    return {
        'query': _without_brackets(context),
        'choices': [_without_brackets(ending) for ending in row['endings']],
        'gold': int(row['label']),
    }


def _without_brackets(text: str) -> str:
    """WikiHow's marks, such as ``[header]``, taken out as lm-eval does."""
    text = text.strip().replace(' [title]', '. ')
    return re.sub(r'\[.*?\]', '', text).replace('  ', ' ')


@dataclass(frozen=True)
class IclTask:
    """A task and where its rows are.

    Attributes:
        name: the file's name, and the task's label.
        hub: the hub's data set and configuration; ``None`` where there is but one.
        folder: the same below a local folder.
        split: the split that is scored.
        convert: makes a row of Foundry's schema from a row of the hub's.
    """

    name: str
    hub: tuple[str, str | None]
    folder: str
    split: str
    convert: Callable[[Row], dict[str, Any]]


ICL_TASKS = (
    IclTask('openbook_qa', ('allenai/openbookqa', 'main'), 'openbookqa/main', 'test', _openbook),
    IclTask(
        'winogrande',
        ('allenai/winogrande', 'winogrande_xl'),
        'winogrande/winogrande_xl',
        'validation',
        _winogrande,
    ),
    IclTask(
        'arc_challenge',
        ('allenai/ai2_arc', 'ARC-Challenge'),
        'ai2_arc/ARC-Challenge',
        'test',
        _question_with_letters,
    ),
    IclTask(
        'arc_easy',
        ('allenai/ai2_arc', 'ARC-Easy'),
        'ai2_arc/ARC-Easy',
        'test',
        _question_with_letters,
    ),
    IclTask('hellaswag', ('Rowan/hellaswag', None), 'hellaswag', 'validation', _hellaswag),
    IclTask('siqa', ('lighteval/siqa', None), 'social_i_qa', 'validation', _social),
    IclTask('piqa', ('baber/piqa', None), 'piqa/plain_text', 'validation', _piqa),
)


def convert(task: IclTask, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Rows of Foundry's schema, one for each of the hub's.

    Raises:
        ValueError: a row's gold is none of its choices, or a choice is empty.
    """
    for i, row in enumerate(rows):
        try:
            converted = task.convert(row)
        except (KeyError, ValueError) as error:
            raise ValueError(f'{task.name} row {i} is not as the hub has it: {error!r}') from error
        options = converted.get('choices') or converted['context_options']
        if not 0 <= converted['gold'] < len(options) or not all(map(str.strip, options)):
            raise ValueError(
                f'{task.name} row {i}: gold {converted["gold"]} of the choices {options!r}; a choice '
                'is missing, or this split has no labels.'
            )
        yield converted


def read_rows(task: IclTask, source: str | Path | None) -> Iterator[Row]:
    """Rows of a task's scored split.

    Args:
        task: which.
        source: a folder of parquet in the hub's layout; ``None`` downloads.

    Raises:
        FileNotFoundError: the split is not there.
    """
    if source is None:
        from datasets import load_dataset

        name, configuration = task.hub
        yield from load_dataset(name, configuration, split=task.split)
        return
    paths = sorted((Path(source) / task.folder).glob(f'{task.split}*.parquet'))
    if not paths:
        raise FileNotFoundError(
            f'{Path(source) / task.folder}/{task.split}*.parquet is not there; give a folder in the '
            'layout of the hub, or none to download.'
        )
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()


def write_tasks(
    out: str | Path, source: str | Path | None = None, tasks: Iterable[IclTask] = ICL_TASKS
) -> dict[str, int]:
    """Writes ``out/TASK.jsonl`` for each task, whole or not at all.

    Returns:
        Rows by task.
    """
    counts = {}
    for task in tasks:
        rows = tqdm(convert(task, read_rows(task, source)), desc=task.name, unit=' rows')
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        write_text(Path(out) / f'{task.name}.jsonl', '\n'.join(lines) + '\n')
        counts[task.name] = len(lines)
    return counts
