# SPDX-License-Identifier: Apache-2.0
"""Keys and values kept between calls: one slot a source that a looped model attends to.

A transformers cache keeps a list of (keys, values) by layer index. A looped model needs more of them
than it has layers, since each iteration has keys of its own:

    encoder layer e          slot e                          E slots
    Global source of layer i slot E + i                      D slots, or none
    Local source of layer i
        at iteration t       slot E + D + t D + i            K D slots, or none

Numbered so, every operation of the cache (cropping, reordering for beams, repeating) acts on all of
them, with no cache class of our own. A cache filled with K iterations serves fewer, too: iteration t
reads no slot of a later one.

Shapes: B batch, H heads, N new positions, M positions visible (cached and new), d head width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_asymloop import AsymLoopConfig

# The cache's name in transformers' outputs, which version 5 changed.
CACHE = 'cache' if 'cache' in CausalLMOutputWithPast.__dataclass_fields__ else 'past_key_values'

Append = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def choose_cache(given: Cache | None, use_cache: bool, recompute: bool) -> Cache | None:
    """The cache of one forward pass: the one given, a new one if it is to be returned, or none.

    Args:
        given: what the caller passed.
        use_cache: whether the caller wants keys and values back.
        recompute: whether layers run again in the backward pass, which would append twice.

    Raises:
        ValueError: the cache cannot grow by slots, or layers that are to be recomputed would fill it.
    """
    if recompute:
        if given is not None:
            raise ValueError(
                'past_key_values with activation checkpointing in training: the backward pass would '
                'fill the cache a second time; leave the cache out, or call model.eval() first.'
            )
        return None
    if given is None:
        return DynamicCache() if use_cache else None
    if not isinstance(given, DynamicCache):
        raise ValueError(
            f'{type(given).__name__} has a slot for each layer, and a looped model needs one for each '
            'iteration; pass a DynamicCache(), or leave past_key_values and cache_implementation out.'
        )
    return given


class CacheSlots:
    """The slots of one forward pass with K iterations; each gives an ``append``, or ``None`` uncached.

    Args:
        config: the model's configuration.
        num_iterations: K of this pass.
        cache: where keys and values are kept, or ``None``.

    Raises:
        ValueError: the cache holds fewer or more positions for some slot than for the others, as after
            a call with another K.
    """

    def __init__(self, config: AsymLoopConfig, num_iterations: int, cache: Cache | None):
        self.cache = cache
        self.n_encoder = config.n_encoder_layers
        self.n_decoder = config.n_decoder_layers
        self.n_global = config.n_decoder_layers if config.global_kv else 0
        self.has_local = config.local_kv
        self.n_slots = self.n_encoder + self.n_global
        if self.has_local:
            self.n_slots += num_iterations * self.n_decoder
        self.n_past = 0
        if cache is not None:
            _extend(cache, self.n_slots)
            lengths = [cache.get_seq_length(slot) for slot in range(self.n_slots)]
            self.n_past = int(lengths[0])
            if len({int(n) for n in lengths}) > 1:
                raise ValueError(
                    f'num_iterations={num_iterations}, but the cache was filled with another number '
                    'of iterations; keep it constant while a cache is in use, or start a new cache.'
                )

    def encoder(self, layer: int) -> Append | None:
        """The source of encoder layer ``layer``."""
        return self._append(layer)

    def global_kv(self, layer: int) -> Append | None:
        """The Global source of decoder layer ``layer``."""
        return self._append(self.n_encoder + layer)

    def local(self, iteration: int, layer: int) -> Append | None:
        """The Local source of decoder layer ``layer`` at iteration ``iteration`` (from 0)."""
        if not self.has_local:
            return None
        first = self.n_encoder + self.n_global
        return self._append(first + iteration * self.n_decoder + layer)

    def _append(self, slot: int) -> Append | None:
        return None if self.cache is None else partial(self.cache.update, layer_idx=slot)


def _extend(cache: Cache, n_slots: int) -> None:
    """Gives the missing slots to a cache that transformers 5 made with one slot for each layer."""
    slots = getattr(cache, 'layers', None)
    if slots and cache.layer_class_to_replicate is None:
        slots.extend(type(slots[0])() for _ in range(n_slots - len(slots)))


def positions(
    attention_mask: Tensor | None, n_new: int, n_past: int, device: torch.device
) -> Tensor:
    """Rotary positions of the new tokens, (B or 1, N): how many visible tokens come before each."""
    if attention_mask is None:
        return torch.arange(n_past, n_past + n_new, device=device)[None]
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -n_new:]


def visible_keys(
    attention_mask: Tensor | None, n_new: int, n_past: int, device: torch.device
) -> Tensor | None:
    """Which keys each new query may read, (B or 1, 1, N, M); ``None`` where the kernel knows it.

    The kernel knows two cases: as many keys as queries (causal), and a single query (all keys). Padding
    on the right needs no mask, since no real query stands behind it.

    Raises:
        ValueError: the mask is no (B, M) matrix over cached and new positions.
    """
    n_keys = n_past + n_new
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape[1] != n_keys:
            raise ValueError(
                f'attention_mask has shape {tuple(attention_mask.shape)}; give (batch, {n_keys}), one '
                f'entry for each of {n_past} cached and {n_new} new positions.'
            )
        seen = attention_mask.bool()
        right_padded = seen.all() if n_past else (seen[:, 1:] <= seen[:, :-1]).all()
        if right_padded:
            attention_mask = None
    if attention_mask is None and (n_past == 0 or n_new == 1):
        return None
    causal_NM = torch.ones(n_new, n_keys, dtype=torch.bool, device=device).tril(n_past)
    if attention_mask is None:
        return causal_NM[None, None]
    # A padded query reads itself, so that its softmax is over something.
    itself_NM = torch.ones(n_new, n_keys, dtype=torch.bool, device=device).tril(n_past).triu(n_past)
    return ((causal_NM & seen[:, None, :]) | itself_NM)[:, None]
