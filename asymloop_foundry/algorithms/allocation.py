# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ALRS: from tail exponents to multipliers to learning rates (spec section 2).

Time ``t`` is the number of optimizer steps already made, so the first step has ``t = 0``. Numbers and
names only: the same code serves every optimizer, scheduler and model.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ['Allocation', 'multipliers_from_alphas']


def multipliers_from_alphas(
    alphas: Mapping[str, float], lowest: float, highest: float
) -> dict[str, float]:
    """``lowest + (highest - lowest) (alpha - alpha_min) / (alpha_max - alpha_min)``.

    Args:
        alphas: Tail exponent of every matrix of the pool, finite.
        lowest: Multiplier of the smallest exponent, 1 in the paper.
        highest: Multiplier of the largest, 5 in the paper (3 for the OLMo-style runs).

    Returns:
        By name; all 1 where the exponents do not differ.
    """
    if not alphas:
        return {}
    smallest, largest = min(alphas.values()), max(alphas.values())
    if smallest == largest:
        return dict.fromkeys(alphas, 1.0)
    return {
        name: lowest + (highest - lowest) * (value - smallest) / (largest - smallest)
        for name, value in alphas.items()
    }


@dataclass
class Allocation:
    """The multipliers in force and the transition that leads to them.

    Attributes:
        multipliers: By name of the parameter. What is absent follows the base schedule.
        previous: Those before the last refresh.
        refreshed_at: ``t`` of the last refresh, None before the first.
        start: Learning rates that were in force at ``refreshed_at``.
        target: Those at the end of the transition, None until :meth:`aim`.
        settled: Whether the transition was abandoned, see :meth:`revert`.
    """

    multipliers: dict[str, float] = field(default_factory=dict)
    previous: dict[str, float] = field(default_factory=dict)
    refreshed_at: int | None = None
    start: dict[str, float] = field(default_factory=dict)
    target: dict[str, float] | None = None
    settled: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> 'Allocation':
        """The inverse of :meth:`state_dict`."""
        return cls(**state)

    def in_transition(self, t: int, transition: int) -> bool:
        """Whether the learning rates at ``t`` lie on the line towards the target."""
        if self.refreshed_at is None or self.settled:
            return False
        return t - self.refreshed_at < transition

    def refresh(self, t: int, multipliers: Mapping[str, float], rates: Mapping[str, float]) -> None:
        """Starts the transition to new multipliers.

        Args:
            t: Steps already made.
            multipliers: The new ones.
            rates: Learning rates that the old allocation gives at ``t``.
        """
        self.previous, self.multipliers = self.multipliers, dict(multipliers)
        self.refreshed_at, self.start, self.target = t, dict(rates), None
        self.settled = False

    def needs_target(self, t: int, transition: int) -> bool:
        """Whether the rates at ``t`` depend on a target that has not been set.

        The rates at the refresh itself do not, so the base schedule need not be projected before a
        first batch has shown how many tokens a batch holds.
        """
        moving = self.in_transition(t, transition) and t != self.refreshed_at
        return moving and self.target is None

    def aim(self, base_at_end: Mapping[str, float]) -> None:
        """Sets the target from the base learning rates at the end of the transition."""
        self.target = {name: m * base_at_end[name] for name, m in self.multipliers.items()}

    def revert(self) -> None:
        """Drops the last refresh and its transition, as the reference code does at the window's end."""
        self.multipliers, self.settled = dict(self.previous), True

    def rates(self, t: int, base: Mapping[str, float], transition: int) -> dict[str, float]:
        """Learning rates of the step made at ``t``.

        Args:
            t: Steps already made.
            base: The base schedule's at ``t``, by name.
            transition: Length of a transition, in steps.

        Returns:
            On the line from ``start`` to ``target`` for ``transition`` steps after a refresh, else
            multiplier times base; base itself for names that have no multiplier.
        """
        rates = {name: self.multipliers.get(name, 1.0) * value for name, value in base.items()}
        if not self.in_transition(t, transition):
            return rates
        assert self.refreshed_at is not None
        if t == self.refreshed_at:
            return rates | {name: self.start[name] for name in self.multipliers}
        assert self.target is not None, 'aim() comes before rates() inside a transition'
        share = (t - self.refreshed_at) / transition
        return rates | {
            name: self.start[name] + (self.target[name] - self.start[name]) * share
            for name in self.multipliers
        }
