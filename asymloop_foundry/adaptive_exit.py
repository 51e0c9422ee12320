# SPDX-License-Identifier: Apache-2.0
"""Fewer iterations for the positions whose state has settled, at generation.

    with adaptive_exit(model, threshold=0.1) as iterations:
        model.generate(ids, max_new_tokens=64)
    iterations.mean()

Each new position iterates until its state moves by less than the threshold, at most K times. Later
positions attend to its Local keys at every iteration, so the slots of the iterations that it left out
get copies of the last that it ran. Prompts run all K iterations. The model's own code knows nothing of
this: for as long as the block lasts, its decoder layers pass settled states on.

Shapes: B batch, N positions, D width, H heads, d head width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

__all__ = ['Iterations', 'adaptive_exit']


@dataclass
class Iterations:
    """How many iterations each generation step ran.

    Attributes:
        counts: one number a step.
    """

    counts: list[int] = field(default_factory=list)

    def mean(self) -> float:
        """Iterations of a step on average.

        Raises:
            ValueError: no step was counted.
        """
        if not self.counts:
            raise ValueError('nothing was generated inside the block, token by token.')
        return sum(self.counts) / len(self.counts)


@contextmanager
def adaptive_exit(model: PreTrainedModel, threshold: float) -> Iterator[Iterations]:
    """Lets each generation step of the block stop iterating once the state has settled.

    Args:
        model: a causal model of this family with a decoder.
        threshold: the change of the state in one iteration over its norm before it, below which a
            position has settled. The rows of a batch run until all have.

    Raises:
        ValueError: the threshold is negative, or the model has no iterations to leave out.
    """
    config = model.config
    if threshold < 0:
        raise ValueError(f'threshold={threshold} must be at least 0.')
    if config.n_decoder_layers == 0 or config.input_injection != 'none':
        raise ValueError(
            'adaptive exit needs decoder layers whose input is the state alone, but '
            f'n_decoder_layers={config.n_decoder_layers} and '
            f'input_injection={config.input_injection!r}; generate without it.'
        )
    iterations = Iterations()
    watch = _Watch(threshold, iterations)
    layers = list(model.model.decoder)
    for layer in layers:
        layer.forward = watch.around(
            layer.forward, first=layer is layers[0], last=layer is layers[-1]
        )
    start = model.model.register_forward_pre_hook(watch.start)
    try:
        yield iterations
    finally:
        start.remove()
        for layer in layers:
            del layer.forward


class _Watch:
    """What one forward pass knows of its state."""

    def __init__(self, threshold: float, iterations: Iterations):
        self.threshold = threshold
        self.iterations = iterations
        self.start()

    def start(self, *_: Any) -> None:
        self.settled = False
        self.n_run = 0
        self.input_BND: Tensor | None = None

    def around(self, forward: Callable, first: bool, last: bool) -> Callable:
        """A decoder layer's forward that passes a settled state on."""
        kept: list[tuple[Tensor, Tensor]] = []

        def run(
            x_BND: Tensor, rope: Any, global_kv: Any, mask: Any, append: Any = None
        ) -> tuple[Tensor, Tensor | None]:
            if x_BND.shape[1] > 1:
                return forward(x_BND, rope, global_kv, mask, append)
            if self.settled:
                if append is not None:
                    append(*kept[0])
                return x_BND, None

            def keep(k_BHNd: Tensor, v_BHNd: Tensor) -> tuple[Tensor, Tensor]:
                kept[:] = [(k_BHNd, v_BHNd)]
                return append(k_BHNd, v_BHNd)

            if first:
                self.input_BND = x_BND
            y_BND, logits = forward(x_BND, rope, global_kv, mask, None if append is None else keep)
            if last:
                self._end_iteration(y_BND)
            return y_BND, logits

        return run

    def _end_iteration(self, y_BND: Tensor) -> None:
        x_BND = self.input_BND
        assert x_BND is not None
        if self.n_run == 0:
            self.iterations.counts.append(0)
        self.n_run += 1
        self.iterations.counts[-1] = self.n_run
        moved = (y_BND - x_BND).norm(dim=-1) / x_BND.norm(dim=-1)
        self.settled = bool((moved < self.threshold).all())
