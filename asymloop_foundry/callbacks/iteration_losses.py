# SPDX-License-Identifier: Apache-2.0
"""Validation cross-entropy after each iteration, along training."""

from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from asymloop_foundry.evaluation.iterations import IterationLosses as Losses

__all__ = ['IterationLosses']

METRIC = 'LanguageCrossEntropy'


class IterationLosses(Callback):
    """Logs ``metrics/EVALUATOR/LanguageCrossEntropy_K1`` to ``_K``: what a smaller K would give.

    They come from validation's own forward passes: beyond those, only the head runs K times. The last is
    the validation loss itself. Evaluators without that metric, such as in-context tasks, are passed over.
    """

    def __init__(self) -> None:
        self.losses: Losses | None = None

    def eval_start(self, state: State, logger: Logger) -> None:
        """Listens to the validation that begins."""
        if METRIC in state.eval_metrics.get(state.dataloader_label or '', {}):
            self.losses = Losses(_unwrapped(state.model).model)
            self.losses.__enter__()

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Keeps the labels, which the ComposerModel takes out of the batch and shifts."""
        if self.losses is not None:
            self.losses.labels = state.batch['labels'].clone()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Logs the means over all ranks."""
        if self.losses is None:
            return
        losses, self.losses = self.losses, None
        losses.__exit__(None, None, None)
        sums = torch.stack(losses.sums)
        total = torch.cat([sums, sums.new_tensor([losses.n_targets])])
        dist.all_reduce(total, reduce_operation='SUM')
        logger.log_metrics(
            {
                f'metrics/{state.dataloader_label}/{METRIC}_K{k}': float(value / total[-1])
                for k, value in enumerate(total[:-1], start=1)
            }
        )


def _unwrapped(model: Any) -> Any:
    """The ComposerModel, below what DDP puts around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
