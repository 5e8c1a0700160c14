"""Start values of rows that are functions of a seed, the key and the element alone.

So a row has the same start value on every server and worker, in every order, and after every restart. Each element has
a number of its own: splitmix64's finaliser of the row's hash and a multiple of the element's index, as its generator
steps from state to state.
"""

from __future__ import annotations

import math

import numpy as np

from psctl.ps.table_messages import Initialiser
from psctl.ps.tables.reductions import Array
from psctl.ps.tables.row_index import Keys, mix

GAMMA = 0x9E3779B97F4A7C15
"""The step of splitmix64's state: an odd number near 2^64 divided by the golden ratio."""

_MASK = (1 << 64) - 1


def initial_values(initial: Initialiser, keys: Keys, width: int) -> Array:
    """Return the start values of rows: float64 (keys, width)."""
    seed = np.uint64((initial.seed * GAMMA + GAMMA) & _MASK)
    rows = mix((keys.view(np.uint64) ^ seed).view(np.int64))
    if initial.distribution == "uniform":
        return (2.0 * _uniforms(rows, np.arange(width)) - 1.0) * initial.scale
    pairs = -(-width // 2)
    one, other = _uniforms(rows, np.arange(pairs)), _uniforms(rows, np.arange(pairs, 2 * pairs))
    radius, angle = np.sqrt(-2.0 * np.log(1.0 - one)), 2.0 * math.pi * other  # Box and Muller 1958
    found = np.empty((len(keys), 2 * pairs))
    found[:, :pairs], found[:, pairs:] = radius * np.cos(angle), radius * np.sin(angle)
    return found[:, :width] * initial.scale


def _uniforms(rows: Array, elements: Array) -> Array:
    """Return one number in [0, 1) for each row and element."""
    steps = (elements.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    hashed = mix((rows[:, None] + steps[None, :]).view(np.int64))
    found: Array = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
