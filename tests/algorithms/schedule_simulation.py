# SPDX-License-Identifier: Apache-2.0
"""ALRS from the specification in plain numpy, sharing no code with the package.

Written to be checked by eye: one loop over the steps, one matrix at a time.
"""

import math

import numpy as np


def tail_exponent(weight):
    """Exponent of the largest half of the squared singular values."""
    eigenvalues = np.sort(np.linalg.svd(np.asarray(weight, np.float64), compute_uv=False) ** 2)
    tail = eigenvalues[len(eigenvalues) // 2 :]
    return 1 + len(tail) / np.log(tail / tail[0]).sum()


def cosine(peak, steps, warmup, floor=0.1):
    """The base learning rate of every step t as stock Composer applies it, one batch late."""

    def f(batch):
        if batch < warmup:
            return batch / warmup
        share = min(1.0, (batch - warmup) / (steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2

    return [peak * f(max(0, t - 1)) for t in range(2 * steps)]


def simulate(base, steps, exponents_at, *, interval, transition, window, top, legacy_cut=False):
    """Learning rate of every matrix at every step.

    Args:
        base: Base learning rate of each step.
        steps: Length of training.
        exponents_at: Function of t giving name -> exponent of the weights before step t.
        interval: Steps between refreshes.
        transition: Steps of a transition.
        window: Last t at which a refresh may happen.
        top: Largest multiplier.
        legacy_cut: Reproduce the reference code at the window's end.

    Yields:
        For each t, name -> learning rate.
    """
    names = list(exponents_at(0))
    multiplier = dict.fromkeys(names, 1.0)
    before = dict(multiplier)
    line = None
    for t in range(steps):
        rate = {}
        for name in names:
            if line is not None and t < line['end']:
                start, end = line['from'][name], line['to'][name]
                rate[name] = start + (end - start) * (t - line['begin']) / transition
            else:
                rate[name] = multiplier[name] * base[t]
        if t <= window and t % interval == 0:
            exponents = exponents_at(t)
            low, high = min(exponents.values()), max(exponents.values())
            before = dict(multiplier)
            for name in names:
                multiplier[name] = 1 + (top - 1) * (exponents[name] - low) / (high - low)
            line = {
                'begin': t,
                'end': t + transition,
                'from': dict(rate),
                'to': {n: multiplier[n] * base[t + transition] for n in names},
            }
        elif legacy_cut and t > window and line is not None and t <= line['end']:
            multiplier, line = before, None
            rate = {name: multiplier[name] * base[t] for name in names}
        yield rate
