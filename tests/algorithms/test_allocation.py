# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymloop_foundry.algorithms.allocation import Allocation, multipliers_from_alphas


@given(st.lists(st.floats(1.01, 20), min_size=2, max_size=20), st.floats(1, 4), st.floats(0, 8))
def test_multipliers_span_the_range_in_the_order_of_the_exponents(values, lowest, extra):
    alphas = {str(index): value for index, value in enumerate(values)}
    found = multipliers_from_alphas(alphas, lowest, lowest + extra)
    if len(set(values)) == 1:
        assert set(found.values()) == {1.0}
        return
    assert min(found.values()) == lowest
    assert max(found.values()) == pytest.approx(lowest + extra)
    ordered = [found[name] for name in sorted(alphas, key=alphas.get)]
    assert ordered == sorted(ordered)


def test_no_exponents_give_no_multipliers():
    assert multipliers_from_alphas({}, 1, 5) == {}


def test_a_transition_joins_the_rate_before_it_to_the_rate_after_it():
    allocation = Allocation()
    base = {'a': 2.0, 'b': 2.0}
    allocation.refresh(10, {'a': 3.0}, allocation.rates(10, base, 4))
    assert not allocation.needs_target(10, 4)
    assert allocation.rates(10, base, 4) == base
    assert allocation.needs_target(11, 4)
    allocation.aim({'a': 1.0, 'b': 1.0})
    rates = [allocation.rates(t, base, 4)['a'] for t in range(10, 16)]
    assert rates == [2.0, 2.25, 2.5, 2.75, 6.0, 6.0]
    assert [allocation.rates(t, base, 4)['b'] for t in range(10, 16)] == [2.0] * 6


def test_without_a_transition_new_multipliers_hold_at_once():
    allocation = Allocation()
    allocation.refresh(0, {'a': 3.0}, {'a': 1.0})
    assert not allocation.needs_target(0, 0)
    assert allocation.rates(0, {'a': 1.0}, 0) == {'a': 3.0}


def test_state_survives_json_to_the_bit():
    allocation = Allocation()
    allocation.refresh(7, {'a': 1 / 3}, {'a': 0.1})
    allocation.aim({'a': 2 / 7})
    restored = Allocation.from_state_dict(json.loads(json.dumps(allocation.state_dict())))
    assert restored == allocation
