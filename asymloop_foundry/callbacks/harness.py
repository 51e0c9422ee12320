# SPDX-License-Identifier: Apache-2.0
"""The seven tasks along training (Figure 6)."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer.core import Callback, Event, State, Time
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist
from torch import nn

from asymloop_foundry.evaluation.harness import accuracies, evaluate, result_path, write
from asymloop_foundry.evaluation.scorer import ContinuationScorer
from asymloop_foundry.evaluation.tasks import TASKS, find_sources

__all__ = ['Harness']


class Harness(Callback):
    """Scores the model with lm-eval while it is trained, at an interval and at the end.

    Logs ``harness/TASK/N-shot/acc`` and their mean, and writes one JSON per evaluation and number of
    shots. All ranks share the work. Training is not disturbed: no random state is touched.

    Args:
        folder: where the JSON goes, on this machine; ``{run_name}`` is replaced.
        interval: how often, such as ``1000ba`` or ``0.1dur``.
        shots: numbers of examples in the prompt.
        tasks: lm-eval's names; all seven by default.
        data: parquet in the hub's layout; by default the hub is asked.
        batch_size: rows per forward pass.
        limit: score only so many rows of each task.

    Raises:
        ValueError: a task is none of the seven.
        FileNotFoundError: ``data`` lacks a task's scored split.
    """

    def __init__(
        self,
        folder: str,
        interval: str | int | Time = '0.1dur',
        shots: Sequence[int] = (0,),
        tasks: Sequence[str] | None = None,
        data: str | None = None,
        batch_size: int = 16,
        limit: int | None = None,
    ):
        self.folder = folder
        try:
            self.due = create_interval_scheduler(interval, include_end_of_training=True)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f'harness.interval={interval!r} is no duration ({error}); give for example 1000ba or 0.1dur.'
            ) from error
        self.shots = tuple(shots)
        self.tasks = tuple(TASKS) if tasks is None else tuple(tasks)
        self.data = data
        self.batch_size = batch_size
        self.limit = limit
        self.last_step = -1
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(
                    f'harness.tasks: {task!r} is none of {", ".join(TASKS)}; leave it out.'
                )
        if data is not None:
            find_sources(data, self.tasks)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Evaluates where checkpoints are saved, if it is time."""
        if event not in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT):
            return
        # At the end of training both events are due, for the same weights.
        if self.due(state, event) and state.timestamp.batch.value != self.last_step:
            self.last_step = state.timestamp.batch.value
            self.evaluate(state, logger)

    def evaluate(self, state: State, logger: Logger) -> None:
        """Scores the model as it is now."""
        model = _unwrapped(state.model)
        training = state.model.training
        state.model.eval()
        scorer = ContinuationScorer(
            model.model,
            model.tokenizer,
            self.batch_size,
            precision=lambda: get_precision_context(state.precision, state.precision_config),
        )
        step = state.timestamp.batch.value
        for shots in self.shots:
            results = evaluate(scorer, self.tasks, shots, self.data, self.limit)
            found = accuracies(results)
            logger.log_metrics(
                {
                    **{f'harness/{task}/{shots}-shot/acc': acc for task, acc in found.items()},
                    f'harness/mean/{shots}-shot/acc': statistics.fmean(found.values()),
                }
            )
            if dist.get_global_rank() == 0:
                facts = {'step': step, 'tokens': state.timestamp.token.value}
                folder = Path(self.folder.format(run_name=state.run_name))
                write(result_path(folder, shots, step), results, **facts)
        state.model.train(training)


def _unwrapped(model: Any) -> Any:
    """The ComposerModel, below what DDP puts around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
