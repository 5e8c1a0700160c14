"""The predicted time of a training step: its compute, and the part of the synchronisation that compute does not hide.

What overlaps depends on the strategy, as `sync/` runs it:

- Collectives, and servers that sum, begin a bucket or shard when backward has computed it, one after another, and must
  have ended before the optimizer steps: with B_i the time at which backward has computed part i, and c_i the seconds of
  its sum, C_i = max(C_(i-1), B_i) + c_i (wait-free backpropagation: Zhang and others, Poseidon, USENIX ATC 2017).
- Servers that hold the values are pushed to in that way. They step when all pushes of a clock are there; then the
  values are pulled, first layers first, while the next forward computes with those that have arrived.
- Where each worker steps a part of the parameters, or servers share hosts with workers, and steps are made in backward,
  values also travel while backward has sent what it has computed, as far as forward would wait for them
  (sync/backward_steps.py). Servers on hosts of their own return each shard's values while the next is pushed.
- With a staleness, or under asp, no worker waits for the values of its own step: the longer one counts.
- Sums of periods are made when the period has ended, and hide nothing.

Forward takes a third of the compute, backward two thirds, and layers take time as their bytes. That compute and sums
may want the same cores is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

FORWARD = 1 / 3
"""The share of a step's compute that forward takes: backward computes twice as many products."""


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step, and of the synchronisation that compute hides."""

    seconds: float
    hidden: float


def summed_in_backward(compute: float, parts: Sequence[float], times: Sequence[float]) -> StepTime:
    """Return the step whose parts are summed while backward still computes others.

    Args:
        compute: seconds.
        parts: sizes, in the order in which backward computes them.
        times: seconds of each part's sum.
    """
    backward = (1 - FORWARD) * compute
    end = compute - backward + _last_end(backward, parts, times)
    return StepTime(end, compute + sum(times) - end)


def pushed_and_pulled(
    compute: float, pushing: float, pulling: float, shards: int, *, in_backward: bool = False, apart: bool = False
) -> StepTime:  # fmt: skip
    """Return the step whose gradients are pushed during backward, and whose values are pulled during the next forward.

    Args:
        compute: seconds.
        pushing: seconds of all pushes.
        pulling: seconds of all pulls.
        shards: their number.
        in_backward: shards are stepped, and pulled, while backward still runs.
        apart: pushes and pulls use different directions of all links.
    """
    backward = (1 - FORWARD) * compute
    early = max(0.0, min(backward - pushing, pulling - FORWARD * compute)) if in_backward else 0.0
    if in_backward and apart:
        early = min(pushing, pulling * (shards - 1) / shards)
    pushed = _last_end(backward, [1.0] * shards, [pushing / shards] * shards)
    end = pushed
    for shard in range(shards):
        end = max(end, pushed + (pulling - early) * (shard + 1) / shards) + FORWARD * compute / shards
    return StepTime(end, compute + pushing + pulling - end)


def without_waiting(compute: float, seconds: float) -> StepTime:
    """Return the step of a worker that does not wait for the values of its own step."""
    return StepTime(max(compute, seconds), min(compute, seconds))


def after_period(compute: float, seconds: float, period: int) -> StepTime:
    """Return the mean step of a period that ends with a synchronisation."""
    return StepTime(compute + seconds / period, 0.0)


def _last_end(backward: float, parts: Sequence[float], times: Sequence[float]) -> float:
    """Return when the last sum ends, counted from the start of backward."""
    whole, computed, end = sum(parts) or 1.0, 0.0, 0.0
    for part, seconds in zip(parts, times, strict=True):
        computed += part
        end = max(end, backward * computed / whole) + seconds
    return max(end, backward)
