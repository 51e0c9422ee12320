# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from family import FAMILY, build, token_ids
from transformers import DynamicCache

from asymloop_foundry.adaptive_exit import adaptive_exit

LOOPED = [
    name
    for name, fields in FAMILY.items()
    if fields['n_decoder_layers'] and fields.get('input_injection') is None
]
OPTIONS = {'max_new_tokens': 6, 'do_sample': False, 'pad_token_id': 0}


@pytest.mark.parametrize('name', LOOPED)
def test_a_threshold_of_zero_changes_nothing(name):
    model = build(name)
    ids = token_ids(rows=2, length=7)
    expected = model.generate(ids, **OPTIONS, num_iterations=3)
    with adaptive_exit(model, 0.0) as iterations:
        found = model.generate(ids, **OPTIONS, num_iterations=3)
    assert torch.equal(found, expected)
    assert iterations.counts == [3] * 5


@pytest.mark.parametrize('name', LOOPED)
def test_a_settled_step_is_one_with_fewer_iterations(name):
    """Behind a prompt of all iterations, the first step that exits at once is a step with K = 1."""
    model = build(name)
    ids = token_ids(rows=2, length=8)
    with torch.no_grad():
        logits = []
        for k, threshold in ((1, 0.0), (3, 1e9)):
            cache = DynamicCache()
            model(ids[:, :7], past_key_values=cache, num_iterations=3)
            with adaptive_exit(model, threshold) as iterations:
                step = model(ids[:, 7:], past_key_values=cache, num_iterations=k)
            logits.append(step.logits)
            assert iterations.counts == [1]
    torch.testing.assert_close(*logits)


def test_left_out_iterations_get_the_keys_of_the_last_that_ran():
    model = build('asymloop')
    ids = token_ids(rows=1, length=8)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :7], past_key_values=cache, num_iterations=3)
        with adaptive_exit(model, 1e9):
            model(ids[:, 7:], past_key_values=cache, num_iterations=3)
    slots = [keys for keys, _ in cache]
    for layer in (4, 5):  # after two encoder and two Global slots
        for later in (layer + 2, layer + 4):
            assert torch.equal(slots[layer][:, :, 7], slots[later][:, :, 7])
            assert not torch.equal(slots[layer][:, :, 6], slots[later][:, :, 6])


def test_the_model_is_as_before_afterwards():
    model = build('asymloop')
    ids = token_ids()
    expected = model(ids).logits
    with pytest.raises(RuntimeError, match='stop'), adaptive_exit(model, 1.0):
        raise RuntimeError('stop')
    assert torch.equal(model(ids).logits, expected)
    assert not any('forward' in vars(layer) for layer in model.model.decoder)


@pytest.mark.parametrize('name', ['dense', 'additive_injection'])
def test_models_without_iterations_to_leave_out_are_refused(name):
    with pytest.raises(ValueError, match='adaptive exit needs'), adaptive_exit(build(name), 0.1):
        pass


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match='threshold=-1'), adaptive_exit(build('asymloop'), -1):
        pass
