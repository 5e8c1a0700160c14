"""The present numbers of a job."""

from __future__ import annotations

from psctl.export.job_gauges import JobGauges
from psctl.job import events
from tests.export.test_metric_records import PROGRESS


def values(gauges: JobGauges, now: float = 20.0) -> dict[str, dict[tuple[str, ...], float]]:
    return {each.name: {sample.labels: sample.value for sample in each.samples} for each in gauges.gauges(now)}


def test_before_the_first_event_only_the_state_and_counts_are_known() -> None:
    found = values(JobGauges())
    assert found["psctl_job_state"] == {("starting",): 1.0}
    assert found["psctl_losses"] == {("worker",): 0, ("server",): 0}
    assert "psctl_step" not in found
    assert "psctl_checkpoint_step" not in found


def test_everything_that_events_tell() -> None:
    gauges = JobGauges()
    for event in (
        events.StateChanged(time=1.0, role="job", rank=0, host="h", state="running"),
        events.StateChanged(time=1.0, role="coordinator", rank=0, host="h", state="running"),
        events.StateChanged(
            time=1.0,
            role="worker",
            rank=0,
            host="h",
            state="running",
            step=9,
            cpu=150,
            memory=7,
            sync=25,
            sends=8e6,
            receives=2e6,
            staleness=3,
            gpu=50,
            gpu_memory=1 << 30,
        ),
        events.StateChanged(time=1.0, role="server", rank=0, host="h", state="running", cpu=10, memory=7),
        events.StateChanged(time=1.0, role="worker", rank=1, host="h", state="lost", step=3),
        PROGRESS,
        events.CheckpointWritten(time=6.0, step=10, path="/c", bytes=5, seconds=0.2),
        events.ReplicasChanged(time=6.5, replicas=1),
        events.WorkerLost(time=7.0, rank=1, host="h", reason="killed"),
        events.Restored(time=8.0, checkpoint="j@10", step=10),
    ):
        gauges.apply(event)
    found = values(gauges)
    assert found["psctl_job_state"] == {("running",): 1.0}
    assert found["psctl_step"] == {(): 10}
    assert found["psctl_total_steps"] == {(): 40}
    assert found["psctl_metric"] == {("loss",): 0.5}
    assert found["psctl_processes"] == {
        ("coordinator", "running"): 1, ("worker", "running"): 1, ("worker", "lost"): 1, ("server", "running"): 1,
    }  # fmt: skip
    assert found["psctl_rank_step"] == {("worker", "0", "h"): 9, ("server", "0", "h"): 0}
    assert found["psctl_rank_cpu_cores"] == {("worker", "0", "h"): 1.5, ("server", "0", "h"): 0.1}
    for name, value in (
        ("staleness", 3), ("sent_bytes_per_second", 8e6), ("received_bytes_per_second", 2e6), ("gpu_ratio", 0.5),
        ("gpu_memory_bytes", 1 << 30),
    ):  # fmt: skip
        assert found[f"psctl_rank_{name}"] == {("worker", "0", "h"): value}, name
    assert found["psctl_rank_sync_ratio"] == {("worker", "0", "h"): 0.25}
    assert found["psctl_checkpoint_age_seconds"] == {(): 14.0}
    assert found["psctl_losses"] == {("worker",): 1, ("server",): 0}
    assert found["psctl_restarts"] == {(): 1}
    assert found["psctl_replicas"] == {(): 1}


def test_the_number_of_metrics_is_bounded() -> None:
    gauges = JobGauges()
    gauges.apply(events.Progress(**{**{each: getattr(PROGRESS, each) for each in PROGRESS.__struct_fields__},
                                    "metrics": {f"m{index}": 1.0 for index in range(3000)}}))  # fmt: skip
    assert len(values(gauges)["psctl_metric"]) == 1000


def test_numbers_of_groups_are_metrics_with_their_names() -> None:
    job = JobGauges()
    job.apply(events.GroupReported(time=6.0, group="evaluate", rank=0, step=9, metrics={"loss": 0.5}))
    job.apply(PROGRESS)
    (metrics,) = [each for each in job.gauges(7.0) if each.name == "psctl_metric"]
    assert {each.labels[0]: each.value for each in metrics.samples}["evaluate/loss"] == 0.5
