# SPDX-License-Identifier: Apache-2.0
"""Foundry's multiple-choice and schema tasks, made right for any tokenizer and any number of choices.

Three things differ from Foundry's own classes:

- T5's tokenizer makes ``</s>`` of an empty text, so that each zero-shot prompt would begin with the end
  of a document; here nothing is put before a prompt that the prompt does not have.
- A batch is as long as its longest row, not as the model's context.
- Questions of one task may differ in their number of choices, as ARC's do.

Shapes: R rows (a question's choices, one row each), N positions.
"""

from collections.abc import Sequence
from typing import Any

from llmfoundry.eval.datasets import (
    InContextLearningMultipleChoiceTaskDataset,
    InContextLearningSchemaTaskDataset,
)
from torch import Tensor

__all__ = ['MultipleChoice', 'Schema']

Batch = dict[str, Any]
# Foundry's keys by what they are per: row, or question.
_ROW_TENSORS = ('input_ids', 'labels', 'attention_mask')
_PER_QUESTION = ('gold_indices', 'choice_groupings')


class _Choices(InContextLearningMultipleChoiceTaskDataset):
    def _fix_eos_on_preamble(self, input_ids: list[int]) -> list[int]:
        if input_ids == [self.tokenizer.eos_token_id]:
            return []
        return super()._fix_eos_on_preamble(input_ids)

    def collate_fn(self, data: list[dict[str, Any]]) -> Batch:
        """A batch without the columns that are padding in every row."""
        batch = super().collate_fn(data)
        n = max(int(span[-1]) for span in batch['continuation_indices']) + 1
        for key in _ROW_TENSORS:
            batch[key] = batch[key][:, :n]
        return batch

    def get_num_samples_in_batch(self, batch: Batch) -> int:
        """Questions in a batch."""
        return len(batch['gold_indices'])

    def split_batch(self, batch: Batch, microbatch_size: int | float | None) -> Sequence[Batch]:
        """Microbatches of so many questions, the choices of each kept together."""
        n_questions = len(batch['gold_indices'])
        size = n_questions if microbatch_size is None else int(microbatch_size)
        return [
            self._questions(batch, start, min(start + size, n_questions))
            for start in range(0, n_questions, size)
        ]

    def _questions(self, batch: Batch, start: int, end: int) -> Batch:
        groups = batch['choice_groupings'][start:end]
        first, last = groups[0][0], groups[-1][1]
        part: Batch = {}
        for key, value in batch.items():
            if isinstance(value, Tensor) or key == 'continuation_indices':
                part[key] = value[first:last]
            elif key in _PER_QUESTION:
                part[key] = value[start:end]
            else:
                part[key] = value
        part['choice_groupings'] = [(a - first, b - first) for a, b in groups]
        return part


class MultipleChoice(_Choices):
    """``icl_task_type: asymloop_multiple_choice``: rows with ``query``, ``choices`` and ``gold``."""


class Schema(InContextLearningSchemaTaskDataset, _Choices):
    """``icl_task_type: asymloop_schema``: rows with ``context_options``, ``continuation``, ``gold``."""
