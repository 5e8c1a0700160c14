"""Events of jobs, for the tests of the page."""

from __future__ import annotations

from psctl.job import events
from psctl.job.events import AnyEvent
from psctl.launch.jobs.step_trace import Span
from psctl.page.history import steps_document
from psctl.types import Document

HOSTILE = (
    "</script><script>document.title = 'OWNED'</script><img src=x onerror=\"document.title='OWNED'\"> & \u2028"
    "\x1b[31mred\x07 'x'"
)
"""A line of a job's output that tries to be markup, script and a control sequence."""


def job_events(name: str, steps: int = 40, began: float = 1_700_000_000.0, *, hostile: str = "") -> list[AnyEvent]:
    """Return the events of a job with two workers and a server, of which a worker was lost."""
    roles = [events.RoleOf("worker", rank, f"node-{rank}") for rank in range(2)] + [
        events.RoleOf("server", 0, "node-0")
    ]
    found: list[AnyEvent] = [
        events.Started(time=began, job=name, hosts=["node-0", "node-1" + hostile], roles=roles),
        events.Planned(
            time=began + 2, size=1_000_000, world=2, chosen="ring", reason="it is the fastest", decided=True,
            candidates=[
                events.PlanCandidate("ring", {"buckets": 1}, 0.004, 2, 1e6, "node-0 to node-1", True, None),
                events.PlanCandidate("ps", {"servers": 1, "hosts": ["node-0"]}, 0.008, 2, 2e6, "node-0", True, None),
                events.PlanCandidate("native", {}, None, None, None, None, False, "not " + (hostile or "here")),
            ],
        ),
    ]  # fmt: skip
    for rank in range(2):
        found.append(
            events.StateChanged(time=began + 1, role="worker", rank=rank, host=f"node-{rank}", state="starting")
        )
    for second in (5, 10):
        for host, capacity in (("node-0", 62.5e6), ("node-1" + hostile, 0.0)):
            traffic = events.HostTraffic(
                time=began + second, host=host, sent=5e6 * second, received=1e6 * second, capacity=capacity
            )
            found.append(traffic)
    gpus = [events.GpuState("NVIDIA H100 80GB HBM3", 97, 61 << 30, 80 << 30)] * 2
    flows = [
        events.HostFlow("node-0", "node-1" + hostile, 4e6),
        events.HostFlow("node-1" + hostile, "node-0", 3e6),
    ]
    found += [
        events.HostGpus(time=began + 10, host="node-0", gpus=gpus),
        events.HostFlows(time=began + 10, flows=flows),
    ]
    for step in range(1, steps + 1):
        time = began + 3 + step
        found.append(
            events.Progress(
                time=time, step=step, epoch=1, metrics={"loss" + hostile: 1 / step, "accuracy": 1 - 1 / step},
                examples_per_second=100.0 + step, bytes_per_second=2e6, sync_seconds=0.004, compute_seconds=0.01,
                staleness=0, hidden_seconds=0.001, total=steps,
            )
        )  # fmt: skip
        for rank in range(2):
            state = events.StateChanged(
                time=time, role="worker", rank=rank, host=f"node-{rank}", state="running", pid=10 + rank, step=step,
                cpu=80, memory=10**8, sync=10 * (step % 5),
            )  # fmt: skip
            found.append(state)
        if step % 10 == 0:
            found.append(events.CheckpointWritten(time=time, step=step, path="/data/" + name, bytes=10**6, seconds=0.2))
        if step == 15:
            found.append(events.WorkerLost(time=time, rank=1, host="node-1", reason="killed by signal 9" + hostile))
            found.append(events.WorkerJoined(time=time + 0.5, rank=1, host="node-1"))
        found.append(events.Log(time=time, rank="worker/0", stream="stdout", text=f"step {step} {hostile}"))
    return found


def failed(name: str, steps: int, *, hostile: str = "") -> events.Finished:
    """Return the end of a job that failed."""
    failure: dict[str, object] = {
        "rank": "worker/1",
        "exception": "ValueError: " + hostile,
        "frames": ["train.py:3 " + hostile],
    }
    return events.Finished(
        time=1_700_000_100.0, status="failed", exit=1, steps=steps, seconds=97.0, metrics={}, failure=failure
    )


def newest_steps() -> Document:
    """Return the times of a step of two workers, of which the second is ready 30 us later."""
    spans = [
        Span(0, "load", 7, 0, 10_000), Span(0, "forward", 7, 10_000, 50_000), Span(0, "backward", 7, 50_000, 100_000),
        Span(0, "synchronize", 7, 100_000, 140_000), Span(0, "step", 7, 0, 150_000),
        Span(1, "compute", 7, 5_000, 130_000), Span(1, "synchronize", 7, 130_000, 140_000),
        Span(1, "step", 7, 5_000, 150_000),
    ]  # fmt: skip
    return steps_document(spans, {"node-0": 0.0, "node-1": 20e-6}, {0: "node-0", 1: "node-1"})
