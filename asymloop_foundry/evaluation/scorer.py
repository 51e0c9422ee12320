# SPDX-License-Identifier: Apache-2.0
"""lm-eval's model interface for this family: exact log-likelihoods, streamed.

Shapes: B batch, N positions, S scored positions of a batch, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from composer.utils import dist
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

__all__ = ['ContinuationScorer']

# Requests that are encoded, sorted by length and scored at a time: what bounds memory.
WINDOW = 2048

Request = tuple[Any, list[int], list[int]]


class ContinuationScorer(HFLM):
    """Scores continuations with a model that is already built.

    Unlike lm-eval's own class it adds no special token to a text and says so if one appears, makes
    logits only where a continuation is scored, holds a window of requests at a time, and shares each
    window among the ranks of a distributed run; every rank gets every score. All else is lm-eval's.

    Args:
        model: a causal language model; under FSDP all ranks must call it together, and do.
        tokenizer: its tokenizer.
        batch_size: rows per forward pass.
        precision: makes the context that forward passes run in, such as Composer's autocast.
        max_length: positions of a prompt with its continuation; by default the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 16,
        precision: Callable[[], AbstractContextManager] = nullcontext,
        max_length: int | None = None,
    ):
        super().__init__(
            pretrained=model,
            backend='causal',
            tokenizer=tokenizer,
            batch_size=batch_size,
            add_bos_token=False,
            max_length=max_length,
        )
        self.precision = precision
        self.n_truncated = 0

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would give it."""
        rank, world = dist.get_global_rank(), dist.get_world_size()
        scores: list[tuple[float, bool]] = []
        progress = tqdm(
            total=len(requests), desc='continuations', disable=disable_tqdm or rank != 0
        )
        for start in range(0, len(requests), WINDOW):
            window = requests[start : start + WINDOW]
            # Ranks score equally many requests, since each forward pass may be a collective.
            share = -(-len(window) // world)
            mine = [window[min(rank + i * world, len(window) - 1)] for i in range(share)]
            scored = super().loglikelihood(mine, disable_tqdm=True)
            by_rank = dist.all_gather_object(scored) if world > 1 else [scored]
            scores += [by_rank[i % world][i // world] for i in range(len(window))]
            progress.update(len(window))
        progress.close()
        return scores

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        eos = self.tokenizer.eos_token_id
        if eos in context_ids or eos in continuation_ids:
            raise ValueError(
                f'the tokenizer put its EOS token (id {eos}) into a text to be scored: '
                f'{(context + continuation)[-80:]!r}. Export the model again, so that its tokenizer '
                'adds no special tokens.'
            )
        return context_ids, continuation_ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Scores encoded (name, context, continuation) triples; longest first, padded on the right."""
        size = override_bs or self.batch_size
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i][1:])))
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            found = self._score([requests[i] for i in batch])
            for i, score in zip(batch, found, strict=True):
                scores[i] = score
        return scores

    def _score(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens does not fit the model's "
                    f'{self.max_length} positions; give a larger --max-length (rotary positions go on).'
                )
            row = context + continuation
            self.n_truncated += len(row) > self.max_length + 1
            rows.append(row[-(self.max_length + 1) :])
        n = max(map(len, rows)) - 1
        # Position p predicts token p + 1, and the last token predicts nothing that is scored.
        first = min(
            len(row) - 1 - len(request[2]) for row, request in zip(rows, requests, strict=True)
        )
        input_BN = torch.zeros(len(rows), n, dtype=torch.long)
        for b, row in enumerate(rows):
            input_BN[b, : len(row) - 1] = torch.tensor(row[:-1])
        logits_BSV = self._logits(input_BN.to(self.device), n - first)
        scores = []
        for b, (row, request) in enumerate(zip(rows, requests, strict=True)):
            target = torch.tensor(request[2], device=logits_BSV.device)
            end = len(row) - 1 - first
            log_p = F.log_softmax(logits_BSV[b, end - len(target) : end].float(), dim=-1)
            greedy = bool((log_p.argmax(dim=-1) == target).all())
            scores.append((float(log_p.gather(-1, target[:, None]).sum()), greedy))
        return scores

    def _logits(self, input_BN: Tensor, keep: int) -> Tensor:
        """Logits of the last ``keep`` positions, (B, S, V). Right padding needs no mask: it is causal."""
        with torch.no_grad(), self.precision():
            return self.model(input_ids=input_BN, use_cache=False, logits_to_keep=keep).logits
