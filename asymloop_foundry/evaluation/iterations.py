# SPDX-License-Identifier: Apache-2.0
"""Validation cross-entropy after each iteration of the decoder, in one pass.

The state after iteration t, normalised and decoded by the head, gives the logits of a model that stops
there: a pass with K iterations holds the losses of K models. They are taken as the state goes by, while
the pass runs, so that FSDP has the head and the norm at hand, and a chunk of positions at a time, so
that no (B, N, V) logits exist.

Shapes: B batch, N positions, D width, V vocabulary, K iterations.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from llmfoundry.data.text_data import build_text_dataloader
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.checks import check_training_data
from ..experiments.text_table import render
from ..models.cross_entropy import linear_cross_entropy

__all__ = [
    'IterationLosses',
    'iteration_losses',
    'loss_table',
    'score_validation',
    'validation_batches',
]


class IterationLosses:
    """Adds up the loss of each iteration's state over the forward passes inside its ``with`` block.

    Args:
        model: a causal model of this family, under FSDP or not. One without a decoder has one state.

    Attributes:
        labels: (B, N) ids of the pass that comes next, not shifted; -100 is not scored.
        sums: summed losses after iterations 1 to K, in fp64, on the model's device.
        n_targets: scored targets.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.labels: Tensor | None = None
        self.sums: list[Tensor] = []
        self.n_targets = 0
        self._iteration = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> 'IterationLosses':
        body = self.model.model
        last_layer = (body.decoder if len(body.decoder) else body.encoder)[-1]
        self._hooks = [
            self.model.register_forward_pre_hook(self._start),
            last_layer.register_forward_hook(self._decode),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def means(self) -> list[float]:
        """Mean loss of a target after each iteration.

        Raises:
            ValueError: nothing was scored.
        """
        if not self.n_targets:
            raise ValueError('no target was scored: every label is padding.')
        return [float(total) / self.n_targets for total in self.sums]

    def _start(self, *_: Any) -> None:
        self._iteration = 0
        if self.labels is not None:
            self.n_targets += int((self.labels[:, 1:] != -100).sum())

    def _decode(self, layer: Any, inputs: Any, output: tuple[Tensor, Any]) -> None:
        if self.labels is None:
            return
        x_BND = self.model.model.norm(output[0])
        loss = linear_cross_entropy(x_BND, self.model.lm_head.weight, self.labels, reduction='sum')
        if self._iteration == len(self.sums):
            self.sums.append(torch.zeros((), dtype=torch.float64, device=loss.device))
        self.sums[self._iteration] += loss.double()
        self._iteration += 1


@torch.no_grad()
def iteration_losses(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    num_iterations: int | None = None,
) -> tuple[list[float], int]:
    """Mean cross-entropy after iterations 1 to K, each equal to a pass with so many.

    Args:
        model: a causal model of this family, in evaluation mode.
        batches: each with ``input_ids`` and ``labels`` (B, N), and an ``attention_mask`` where padding is
            not on the right.
        num_iterations: K; by default the configuration's.

    Returns:
        K means over the scored targets, and how many those were.

    Raises:
        ValueError: the model cannot run K iterations, or nothing was scored.
    """
    device = next(model.parameters()).device
    with IterationLosses(model) as losses:
        for batch in batches:
            losses.labels = batch['labels'].to(device)
            mask = batch.get('attention_mask')
            model(
                input_ids=batch['input_ids'].to(device),
                attention_mask=None if mask is None else mask.to(device),
                num_iterations=num_iterations,
                use_cache=False,
                logits_to_keep=1,
            )
    return losses.means(), losses.n_targets


def validation_batches(
    data: str | Path,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    batch_size: int,
) -> Iterable[Mapping[str, Tensor]]:
    """The rows of prepared data as Foundry's validation gives them.

    Args:
        data: what ``data_prep/convert_fineweb.py`` wrote.
        split: such as ``val``.
        tokenizer: the model's.
        seq_len: N.
        batch_size: rows of a batch.

    Raises:
        ValueError: no rows are there, or they were made with another tokenizer or length.
    """
    dataset = {'local': str(data), 'split': split, 'shuffle': False, 'max_seq_len': seq_len}
    check_training_data(dataset, tokenizer, seq_len, '--data')
    spec = build_text_dataloader(
        tokenizer=tokenizer,
        device_batch_size=batch_size,
        dataset=dataset,
        drop_last=False,
        num_workers=0,
        pin_memory=False,
        prefetch_factor=None,
        persistent_workers=False,
    )
    return spec.dataloader


def score_validation(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], num_iterations: Sequence[int]
) -> dict[str, Any]:
    """Cross-entropy and perplexity at several K, by one pass with the largest.

    Args:
        model: a causal model of this family, in evaluation mode.
        batches: as :func:`iteration_losses` takes them.
        num_iterations: the K to report.

    Raises:
        ValueError: the model cannot run one of them.
    """
    for k in num_iterations:
        model.config.check_iterations(k)
    shown = tqdm(batches, desc='validation', unit='batch')
    losses, n_targets = iteration_losses(model, shown, max(num_iterations))
    return {
        'n_targets': n_targets,
        'losses': [
            {
                'num_iterations': k,
                'cross_entropy': losses[k - 1],
                'perplexity': math.exp(losses[k - 1]),
            }
            for k in sorted(set(num_iterations))
        ],
    }


def loss_table(results: Mapping[str, Any]) -> str:
    """The results of :func:`score_validation`, a line for each K."""
    rows = [
        [str(row['num_iterations']), f'{row["cross_entropy"]:.4f}', f'{row["perplexity"]:.2f}']
        for row in results['losses']
    ]
    return render(['K', 'cross-entropy', 'perplexity'], rows)
