"""The summary of a run: what its events amount to, also after restarts."""

from __future__ import annotations

from typing import Any

from psctl.job import events as kinds
from psctl.view.run_summary import RunSummary


def progress(time: float, step: int, loss: float, **more: Any) -> kinds.Progress:
    given = {"examples_per_second": 640.0, "bytes_per_second": 1e6, "sync_seconds": 0.01, "compute_seconds": 0.03}
    return kinds.Progress(time=time, step=step, epoch=1, metrics={"loss": loss}, staleness=0, **{**given, **more})


def written(step: int) -> kinds.CheckpointWritten:
    return kinds.CheckpointWritten(time=0.0, step=step, path="", bytes=1, seconds=0.1)


LOST = kinds.WorkerLost(time=0.0, rank=1, host="b", reason="killed")


def lines(*events: kinds.AnyEvent) -> dict[str, str]:
    summary = RunSummary()
    for event in events:
        summary.apply(event)
    return dict(summary.lines())


def test_rates_are_weighted_by_the_time_and_seconds_by_the_steps() -> None:
    found = lines(
        progress(10.0, 0, 1.0),
        progress(11.0, 10, 1.0, examples_per_second=100.0, compute_seconds=0.05, sync_seconds=0.0),
        progress(14.0, 40, 1.0, examples_per_second=500.0, compute_seconds=0.01, sync_seconds=0.02, bytes_per_second=0),
    )
    assert found["throughput"] == "400 examples/s, 10 steps/s, 250 kB/s moved"
    assert found["a step"] == "compute 20 ms, sync 15 ms (43%)"


def test_nothing_is_told_that_is_not_known() -> None:
    assert lines() == {}
    assert lines(progress(1.0, 1, 1.0)) == {}, "one event is no interval"
    assert lines(progress(1.0, 1, 1.0), progress(1.0, 2, 1.0)) == {}
    assert lines(written(7)) == {"checkpoints": "1 written"}, "of no known loss"


def test_the_best_checkpoint_is_that_of_the_least_loss() -> None:
    events = [
        e for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)) for e in (progress(step, step, loss), written(step))
    ]
    assert lines(*events)["checkpoints"] == "3 written, best at step 20 (loss 1)"
    back = kinds.Restored(time=40.0, checkpoint="a-1@10", step=10, lost=20)
    assert lines(*events, LOST, back)["checkpoints"] == "3 written", "the best one is of steps that are done again"


def test_losses_restarts_and_repeated_steps_are_counted() -> None:
    resumed = kinds.Restored(time=1.0, checkpoint="a-1@10", step=10)
    assert "survived" not in lines(resumed), "a job that begins with a checkpoint has survived nothing"
    assert lines(LOST)["survived"] == "1 lost worker; no step was repeated"
    server = kinds.ServerLost(time=0.0, rank=0, host="a", reason="killed")
    back = kinds.Restored(time=1.0, checkpoint="a-1@10", step=10, lost=19)
    found = lines(resumed, LOST, server, LOST, back)
    assert found["survived"] == "1 lost server, 2 lost workers; started again once, 19 steps repeated"


def test_an_interval_across_a_restart_does_not_count() -> None:
    back = kinds.Restored(time=50.0, checkpoint="a-1@10", step=10, lost=19)
    found = lines(
        progress(0.0, 0, 1.0), progress(1.0, 10, 1.0), LOST, back, progress(60.0, 12, 1.0), progress(61.0, 22, 1.0)
    )
    assert found["throughput"].startswith("640 examples/s, 10 steps/s")


def test_steps_of_several_events_of_one_interval_count() -> None:
    found = lines(progress(10.0, 0, 1.0), progress(12.0, 15, 1.0), progress(12.0, 20, 1.0))
    assert found["throughput"].startswith("640 examples/s, 10 steps/s")


def test_a_run_whose_steps_are_not_counted_has_its_use_of_processors_and_network() -> None:
    def uses(rank: int, cpu: int) -> kinds.StateChanged:
        return kinds.StateChanged(time=1.0, role="worker", rank=rank, host="a", state="running", cpu=cpu, memory=10**8)

    def moves(host: str, sent: float) -> kinds.HostTraffic:
        return kinds.HostTraffic(time=1.0, host=host, sent=sent, received=1e6)

    found = lines(uses(0, 100), uses(0, 200), uses(1, 50), moves("a", 2e6), moves("a", 4e6), moves("b", 1e6))
    assert found == {
        "processors": "1.0 cores a worker",
        "network": "a host sent 3 MB/s and received 1 MB/s at most",
    }
