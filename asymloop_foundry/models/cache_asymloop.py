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

A DynamicCache copies all that it holds to add one position, a third of a token's time at 512 positions.
Here a slot is given room for later positions (``_Room``), which costs memory for an eighth more of them
and is invisible otherwise: the cache holds views of it.

Shapes: B batch, H heads, N new positions, M positions visible (cached and new), R positions that there
is room for, d head width.
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
        self.in_place = False
        if cache is not None:
            _extend(cache, self.n_slots)
            lengths = [cache.get_seq_length(slot) for slot in range(self.n_slots)]
            self.n_past = int(lengths[0])
            if len({int(n) for n in lengths}) > 1:
                raise ValueError(
                    f'num_iterations={num_iterations}, but the cache was filled with another number '
                    'of iterations; keep it constant while a cache is in use, or start a new cache.'
                )
            self.in_place = self.n_past > 0 and _can_have_room(cache)

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
        if self.cache is None:
            return None
        if self.in_place:
            return partial(_append_in_place, self.cache, slot)
        return partial(self.cache.update, layer_idx=slot)


class _Room:
    """Memory behind one slot's keys and values, where new positions are written and none is moved.

    A position is written once: where a cache was cropped or reordered, its next positions get a new
    room, so that no other view of the old ones (another cache made of the same tensors) ever changes.

    Args:
        held: keys and values so far, (B, H, M, d) each.
        n_positions: R.
    """

    def __init__(self, held: tuple[Tensor, Tensor], n_positions: int):
        self.n_used, self.n_positions = held[0].shape[2], n_positions
        self.buffers = []
        for x_BHMd in held:
            buffer_BHRd = x_BHMd.new_empty(*x_BHMd.shape[:2], n_positions, x_BHMd.shape[3])
            buffer_BHRd[:, :, : self.n_used] = x_BHMd
            self.buffers.append(buffer_BHRd)
        self.views = held

    def continues(self, held: tuple[Tensor, Tensor], n_new: int) -> bool:
        """Whether a cache holds what was returned last, with place for ``n_new`` more."""
        return (
            held[0] is self.views[0]
            and held[1] is self.views[1]
            and self.n_used + n_new <= self.n_positions
            and (torch.is_inference_mode_enabled() or not self.buffers[0].is_inference())
        )

    def write(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Puts keys and values behind the held ones; returns views of all of them."""
        n_new = new[0].shape[2]
        for x_BHNd, buffer_BHRd in zip(new, self.buffers, strict=True):
            buffer_BHRd.narrow(2, self.n_used, n_new).copy_(x_BHNd)
        self.n_used += n_new
        k_BHRd, v_BHRd = self.buffers
        self.views = k_BHRd.narrow(2, 0, self.n_used), v_BHRd.narrow(2, 0, self.n_used)
        return self.views


def _can_have_room(cache: Cache) -> bool:
    """Plain caches, where no gradient flows through them and nothing is traced."""
    return (
        type(cache) is DynamicCache
        and not getattr(cache, 'offloading', False)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _append_in_place(
    cache: DynamicCache, slot: int, k_BHNd: Tensor, v_BHNd: Tensor
) -> tuple[Tensor, Tensor]:
    """``cache.update`` of a slot that holds positions already."""
    layer = cache.layers[slot] if hasattr(cache, 'layers') else None  # transformers 5
    held = (
        (cache.key_cache[slot], cache.value_cache[slot])
        if layer is None
        else (layer.keys, layer.values)
    )
    if held[0].dtype is not k_BHNd.dtype or held[0].shape[0] != k_BHNd.shape[0]:
        return cache.update(k_BHNd, v_BHNd, slot)
    rooms = cache.__dict__.setdefault('_rooms', {})
    n_past, n_new = held[0].shape[2], k_BHNd.shape[2]
    room = rooms.get(slot)
    if room is None or not room.continues(held, n_new):
        room = rooms[slot] = _Room(held, n_past + n_new + max(64, n_past // 8))
    held = room.write((k_BHNd, v_BHNd))
    if layer is not None:
        layer.keys, layer.values = held
    else:
        cache.key_cache[slot], cache.value_cache[slot] = held
        cache._seen_tokens += n_new if slot == 0 else 0
    return held


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
