"""The times of steps in memory: what was written is read, the newest is kept, and half a span is never read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from psctl.process import step_ring
from psctl.process.step_ring import KINDS, SPANS, ProfileRequest, StepRecorder, StepRing, StepSpan, read_spans
from tests.helpers.step_memory import step_memory


@pytest.fixture
def memory() -> Iterator[int]:
    with step_memory() as descriptor:
        yield descriptor


def test_memory_that_no_worker_has_begun_has_no_spans(memory: int) -> None:
    assert read_spans(memory) == []
    StepRing(os.dup(memory))
    assert read_spans(memory) == []


def test_the_newest_spans_are_kept(memory: int) -> None:
    ring = StepRing(os.dup(memory))
    count = 2 * SPANS + 7
    for number in range(count):
        ring.add(number % len(KINDS), number, number, number + 1)
    found = read_spans(memory)
    assert [span.step for span in found] == list(range(count - SPANS + 1, count))
    assert found[-1] == StepSpan(KINDS[(count - 1) % len(KINDS)], count - 1, count - 1, count)


def test_no_half_written_span_is_read_while_the_worker_writes(memory: int) -> None:
    ring, over = StepRing(os.dup(memory)), threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            ring.add(number % len(KINDS), number, 3 * number, 3 * number + number % 5)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            for span in read_spans(memory):
                assert span == StepSpan(KINDS[span.step % len(KINDS)], span.step, 3 * span.step, span.end)
                assert span.end == 3 * span.step + span.step % 5
    finally:
        over.set()
        thread.join()


def test_each_request_of_a_profile_is_another_one(memory: int) -> None:
    ring = StepRing(os.dup(memory))
    assert ring.profile_request() == ProfileRequest(0, 0)
    step_ring.request_profile(memory, 5)
    step_ring.request_profile(memory, 5)
    assert ring.profile_request() == ProfileRequest(2, 5)


class ManualRecorder(StepRecorder):
    """Records with times of the test's own."""

    time = 0

    def now(self) -> int:
        self.time += 10
        return self.time


def test_the_parts_of_a_step_follow_each_other(memory: int) -> None:
    recorder = ManualRecorder(StepRing(os.dup(memory)))
    recorder.continue_after(4)
    began = recorder.now()  # 10
    recorder.loaded(began)  # 20
    recorder.forward()  # 30
    recorder.forward()
    recorder.gradient()  # 40
    recorder.gradient()
    began = recorder.now()  # 50
    recorder.synchronized(began)  # 60
    began = recorder.now()  # 70
    recorder.updated(began)  # 80
    began = recorder.now()  # 90
    recorder.saved(began)  # 100
    assert sorted(read_spans(memory), key=lambda span: (span.begin, -span.end)) == [
        StepSpan("step", 5, 10, 80), StepSpan("load", 5, 10, 20), StepSpan("forward", 5, 30, 40),
        StepSpan("backward", 5, 40, 50), StepSpan("synchronize", 5, 50, 60), StepSpan("update", 5, 70, 80),
        StepSpan("checkpoint", 5, 90, 100),
    ]  # fmt: skip


def test_a_step_without_known_gradients_is_computation_until_the_update(memory: int) -> None:
    recorder = ManualRecorder(StepRing(os.dup(memory)))
    recorder.forward()  # 10
    recorder.updated(recorder.now())  # 20, 30
    assert read_spans(memory) == [
        StepSpan("compute", 1, 10, 20), StepSpan("update", 1, 20, 30), StepSpan("step", 1, 10, 30)
    ]  # fmt: skip


def test_a_wait_within_the_forward_does_not_end_the_backward(memory: int) -> None:
    recorder = ManualRecorder(StepRing(os.dup(memory)))
    recorder.forward()  # 10
    recorder.synchronized(recorder.now())  # 20, 30: for values of the step before
    recorder.gradient()  # 40
    recorder.updated(recorder.now())  # 50, 60
    kinds = {span.kind: (span.begin, span.end) for span in read_spans(memory)}
    assert kinds["forward"] == (10, 40)
    assert kinds["synchronize"] == (20, 30)
    assert kinds["backward"] == (40, 50)


def test_pushes_and_pulls_are_spans_of_their_own(memory: int) -> None:
    recorder = ManualRecorder(StepRing(os.dup(memory)))
    recorder.pushed(recorder.now())  # 10, 20
    recorder.continue_after(1)
    recorder.pulled(5, 0.5)
    recorder.pulled(30, 15e-9)  # not known: until now, 30
    assert read_spans(memory) == [
        StepSpan("push", 1, 10, 20), StepSpan("pull", 2, 5, 500_000_000), StepSpan("pull", 2, 30, 30)
    ]  # fmt: skip


def test_a_recorder_without_memory_does_nothing() -> None:
    recorder = StepRecorder()
    recorder.forward()
    recorder.gradient()
    recorder.updated(recorder.now())
    assert recorder.profile_request == ProfileRequest(0, 0)
