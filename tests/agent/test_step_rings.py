"""How a worker's time is divided, from the memory that it writes the parts of its steps into."""

from __future__ import annotations

import os

from psctl.agent.step_rings import StepRings, parts_of
from psctl.process.step_ring import KINDS, SPANS, StepRing, StepSpan
from psctl.types import Member

WORKER = Member("worker", 0)


def test_what_is_left_of_a_step_is_computation_and_a_wait_in_the_update_is_a_wait() -> None:
    spans = [
        StepSpan("load", 1, 0, 10), StepSpan("forward", 1, 10, 40), StepSpan("synchronize", 1, 60, 90),
        StepSpan("update", 1, 70, 100), StepSpan("step", 1, 0, 100), StepSpan("checkpoint", 1, 100, 120),
    ]  # fmt: skip
    assert parts_of(spans, 200) == (25, 15, 5, 5, 10), "compute 50, sync 30, load 10, update 10, checkpoint 20 of 200"
    assert sum(parts_of(spans, 60)) <= 100, "spans that began before"
    assert parts_of([], 0) == (0, 0, 0, 0, 0)


def test_an_agent_divides_the_time_between_two_looks() -> None:
    now = [1_000]
    rings = StepRings(lambda: now[0])
    with rings.opened(WORKER) as descriptor:
        ring = StepRing(os.dup(descriptor))
    assert rings.parts(WORKER) == (), "it has not finished a step"
    ring.add(KINDS.index("step"), 1, 1_000, 1_100)
    now[0] = 1_200
    assert rings.parts(WORKER) == (), "the first look: when training began is not known"
    ring.add(KINDS.index("step"), 2, 1_200, 1_250)
    now[0] = 1_300
    assert rings.parts(WORKER) == (50, 0, 0, 0, 0)
    now[0] = 9_000
    assert rings.parts(WORKER) == (50, 0, 0, 0, 0), "a long step goes on"
    for step in range(3, 3 + 2 * SPANS):
        ring.add(KINDS.index("step"), step, 0, 1)
    assert rings.parts(WORKER)[0] >= 1, "a ring that was overwritten meanwhile"
    rings.ended(WORKER)
    assert rings.parts(WORKER) == ()
