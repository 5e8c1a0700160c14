"""How much of the synchronisation hides behind the backward pass.

Gradients of the last layers are there first. With B_l the time until backward has done layer l (and all above it) and
c_l the communication of layer l, sent in the order in which they are ready over one channel,

    C_L = B_L + c_L        C_l = max(C_{l+1}, B_l) + c_l        iteration = forward + C_1

so what can't be hidden is at least the first layer's own c_1, and all of it when communication is the longer.
"""

from __future__ import annotations

from collections.abc import Sequence


def finish_times(backward: Sequence[float], communication: Sequence[float]) -> list[float]:
    """Return when each layer's gradient is synchronised, counted from the start of backward.

    Args:
        backward: seconds of each layer's backward, first layer first.
        communication: seconds to synchronise each.
    """
    ready, free, found = 0.0, 0.0, []
    for own, sync in zip(reversed(backward), reversed(communication), strict=True):
        ready += own
        free = max(free, ready) + sync
        found.append(free)
    return found[::-1]


def iteration(forward: float, backward: Sequence[float], communication: Sequence[float]) -> float:
    """Return the seconds of a training step whose synchronisation overlaps with backward."""
    return forward + max(finish_times(backward, communication), default=0.0)


def fused(latency: float, per_byte: float, sizes: Sequence[float], together: bool) -> float:
    """Return the seconds of synchronising tensors of these bytes one by one, or fused into one message each time."""
    messages = min(1, len(sizes)) if together else len(sizes)
    return messages * latency + per_byte * sum(sizes)
