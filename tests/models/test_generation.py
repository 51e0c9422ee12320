# SPDX-License-Identifier: Apache-2.0
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
