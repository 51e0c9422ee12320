# SPDX-License-Identifier: Apache-2.0
import copy
import random

import pytest
import torch
from family import FAMILY, build, token_ids
from transformers.cache_utils import DynamicCache, StaticCache

MEMBERS_AND_K = [
    (name, k)
    for name, fields in FAMILY.items()
    for k in ((1, 3, 5) if fields['n_decoder_layers'] else (1,))
]


@pytest.fixture(params=MEMBERS_AND_K, ids=lambda pair: f'{pair[0]}-{pair[1]}')
def case(request):
    """A member, a call with its cache, and the logits of one pass without."""
    name, k = request.param
    model = build(name)
    ids = token_ids(rows=2, length=19)

    @torch.no_grad()
    def call(chunk, cache):
        return model(chunk, past_key_values=cache, use_cache=True, num_iterations=k).logits

    return call, ids, model(ids, num_iterations=k).logits


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)


def test_prefill_in_chunks_equals_one_pass(case):
    call, ids, expected = case
    cache = DynamicCache()
    chunks = [call(ids[:, a:b], cache) for a, b in ((0, 7), (7, 8), (8, 19))]
    close(torch.cat(chunks, dim=1), expected)


def test_token_by_token_equals_one_pass(case):
    call, ids, expected = case
    cache = DynamicCache()
    found = [call(ids[:, :3], cache), *(call(ids[:, n : n + 1], cache) for n in range(3, 19))]
    close(torch.cat(found, dim=1), expected)


def test_a_cropped_cache_forgets_what_was_cropped(case):
    call, ids, expected = case
    cache = DynamicCache()
    call(ids[:, :9], cache)
    call((ids[:, 9:14] + 1) % 61, cache)
    cache.crop(9)
    close(call(ids[:, 9:], cache), expected[:, 9:])


def test_a_reordered_cache_follows_its_rows(case):
    call, ids, expected = case
    cache = DynamicCache()
    call(ids[:, :9], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    close(call(ids.flip(0)[:, 9:], cache), expected.flip(0)[:, 9:])


@pytest.mark.parametrize('options', [{'num_beams': 3, 'do_sample': False}, {'do_sample': True}])
@pytest.mark.parametrize('name', FAMILY)
def test_beams_and_samples_are_the_same_with_the_cache_and_without(name, options):
    model = build(name)
    prompts = token_ids(rows=2, length=6)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    found = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        found.append(
            model.generate(
                prompts,
                attention_mask=mask,
                max_new_tokens=10,
                pad_token_id=0,
                use_cache=use_cache,
                **options,
            )
        )
    assert torch.equal(*found)


def test_a_cache_serves_fewer_iterations_but_not_more_again():
    model = build('asymloop')
    ids = token_ids(length=9)
    cache = DynamicCache()
    model(ids[:, :5], past_key_values=cache, num_iterations=3)
    fewer = model(ids[:, 5:], past_key_values=cache, num_iterations=1).logits
    close(fewer, model(ids, num_iterations=1).logits[:, 5:])
    with pytest.raises(ValueError, match=r'num_iterations=3.*another number'):
        model(ids[:, :1], past_key_values=cache, num_iterations=3)


def test_positions_that_another_cache_shares_are_never_rewritten():
    model = build('asymloop')
    ids = token_ids(length=19)
    with torch.no_grad():
        cache = DynamicCache()
        for chunk in (ids[:, :9], ids[:, 9:10], ids[:, 10:12]):
            model(chunk, past_key_values=cache)
        shared = DynamicCache.from_legacy_cache(cache.to_legacy_cache())
        cache.crop(10)
        model((ids[:, 10:14] + 1) % 61, past_key_values=cache)
        found = model(ids[:, 12:], past_key_values=shared).logits
    close(found, model(ids).logits[:, 12:])


def test_a_copied_cache_goes_its_own_way():
    model = build('asymloop')
    ids = token_ids(length=19)
    with torch.no_grad():
        cache = DynamicCache()
        for chunk in (ids[:, :9], ids[:, 9:12]):
            model(chunk, past_key_values=cache)
        copied = copy.deepcopy(cache)
        model((ids[:, 12:14] + 1) % 61, past_key_values=copied)
        found = model(ids[:, 12:], past_key_values=cache).logits
    close(found, model(ids).logits[:, 12:])


def test_a_cache_is_moved_only_when_its_room_is_used_up():
    model = build('asymloop')
    ids = token_ids(rows=1, length=63)
    addresses = set()
    with torch.no_grad():
        cache = DynamicCache()
        model(ids[:, :9], past_key_values=cache)
        for n in range(9, 63):
            model(ids[:, n : n + 1], past_key_values=cache)
            addresses.add(next(iter(cache))[0].data_ptr())
    assert len(addresses) == 1


def test_a_cache_of_inference_mode_goes_on_outside_it():
    model = build('asymloop')
    ids = token_ids(length=19)
    cache = DynamicCache()
    with torch.inference_mode():
        for chunk in (ids[:, :9], ids[:, 9:12]):
            model(chunk, past_key_values=cache)
    with torch.no_grad():
        found = model(ids[:, 12:], past_key_values=cache).logits
    close(found, model(ids).logits[:, 12:])


def test_gradients_flow_through_a_cache():
    model = build('asymloop')
    ids = token_ids(length=12)
    gradients = []
    for cached in (True, False):
        model.zero_grad()
        if cached:
            cache = DynamicCache()
            parts = [model(ids[:, a:b], past_key_values=cache) for a, b in ((0, 7), (7, 12))]
            logits = torch.cat([part.logits for part in parts], dim=1)
        else:
            logits = model(ids).logits
        logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_rows_that_the_cache_does_not_hold_are_an_error():
    model = build('asymloop')
    ids = token_ids(rows=2, length=9)
    with torch.no_grad():
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        with pytest.raises(RuntimeError):
            model(ids[:1], past_key_values=cache)


def test_generation_goes_on_from_a_cache_that_is_given():
    model = build('asymloop')
    ids = token_ids(rows=1, length=9)
    cache = DynamicCache()
    model(ids[:, :-1], past_key_values=cache)
    options = {'max_new_tokens': 8, 'do_sample': False, 'pad_token_id': 0}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)


def test_a_cache_with_a_slot_for_each_layer_only_is_refused():
    model = build('asymloop')
    cache = StaticCache(model.config, max_batch_size=2, max_cache_len=32)
    with pytest.raises(ValueError, match=r'StaticCache.*pass a DynamicCache'):
        model(token_ids(), past_key_values=cache)


def test_recomputed_layers_never_fill_a_cache():
    model = build('asymloop', activation_checkpointing=True).train()
    ids = token_ids()
    output = model(ids, labels=ids, use_cache=True)
    output.loss.backward()
    assert output.past_key_values is None
    with pytest.raises(ValueError, match='activation checkpointing'):
        model(ids, past_key_values=DynamicCache())


@pytest.mark.parametrize('seed', range(24))
def test_generation_from_random_prompts_equals_full_recomputation(seed):
    """Random member, K, rows, left padding and prefill in chunks, against passes without a cache."""
    draw = random.Random(seed)
    name = draw.choice(list(FAMILY))
    k = draw.randint(1, 5) if FAMILY[name]['n_decoder_layers'] else 1
    rows, length, new = draw.randint(1, 4), draw.randint(2, 24), draw.randint(1, 9)
    model = build(name)
    ids = torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, length + new, dtype=torch.long)
    for row in mask:
        row[: draw.randint(0, length - 1)] = 0
    with torch.no_grad():
        expected = ids
        for n in range(length, length + new):
            logits = model(expected, attention_mask=mask[:, :n], num_iterations=k).logits[:, -1]
            expected = torch.cat([expected, logits.argmax(dim=-1, keepdim=True)], dim=1)
        cache, n_past = DynamicCache(), 0
        while n_past < length - 1 and draw.random() < 0.8:
            n = draw.randint(n_past + 1, length - 1)
            chunk = {'attention_mask': mask[:, :n], 'past_key_values': cache}
            model(ids[:, n_past:n], num_iterations=k, **chunk)
            n_past = n
        found = model.generate(
            ids,
            attention_mask=mask[:, :length],
            past_key_values=cache,
            num_iterations=k,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
    assert torch.equal(found, expected)
