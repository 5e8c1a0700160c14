"""The history of a job: what it keeps, what it drops, and that text of other machines is harmless in it."""

from __future__ import annotations

import json

import msgspec
import pytest

from psctl.job import events
from psctl.page.history import CHECKPOINTS, LINES, SPANS, JobHistory
from tests.page.sample import HOSTILE, failed, job_events, newest_steps


def history(found: list[events.AnyEvent]) -> JobHistory:
    made = JobHistory("mine-1", "lab")
    for event in found:
        made.apply(event)
    return made


def test_a_jobs_events_become_series_ranks_plan_checkpoints_notes_and_lines() -> None:
    document = history(job_events("mine-1")).document()
    assert document["metrics"]["loss"]["steps"] == list(range(1, 41))
    assert document["metrics"]["loss"]["seconds"][:2] == [4, 5]
    assert document["metrics"]["loss"]["values"][9] == 0.1
    assert set(document["rates"]) == {"examples_per_second", "bytes_per_second", "compute", "sync", "hidden"}
    assert (document["step"], document["total"], document["state"]) == (40, 40, "starting")
    worker = document["ranks"]["worker/1"]
    assert (worker["host"], worker["cpu"], worker["memory"]) == ("node-1", 80, 10**8)
    assert worker["spans"][:3] == [
        [1, "starting", ()], [4, "running", (90, 10, 0, 0, 0)], [5, "running", (80, 20, 0, 0, 0)],
    ]  # fmt: skip
    assert [18, "lost", ()] in worker["spans"]
    assert document["plan"]["measured"] == pytest.approx(0.005)
    assert [each["strategy"] for each in document["plan"]["candidates"]] == ["ring", "ps", "native"]
    assert document["plan"]["candidates"][1]["params"] == 'servers 1, hosts ["node-0"]'
    assert [each["step"] for each in document["checkpoints"]] == [10, 20, 30, 40]
    assert [each["level"] for each in document["notes"]] == ["error", "info"]
    assert document["lines"][0] == [4, "worker/0", "stdout", "step 1 "]
    assert document["traffic"]["node-0"]["sent"] == {"steps": [5, 10], "seconds": [5, 10], "values": [25e6, 50e6]}
    assert document["traffic"]["node-0"]["capacity"] == 62.5e6
    assert document["failure"] is None
    assert msgspec.json.decode(msgspec.json.encode(document)) == json.loads(json.dumps(document))


def test_a_job_that_has_not_begun_has_a_document() -> None:
    document = JobHistory("mine-1", "lab").document()
    assert (document["step"], document["seconds"], document["left"], document["plan"]) == (0, 0, None, None)
    json.dumps(document, allow_nan=False)


def test_steps_that_are_repeated_replace_those_before() -> None:
    made = history(job_events("mine-1"))
    made.apply(events.Restored(time=1_700_000_050.0, checkpoint="mine-1@20", step=20, lost=20))
    assert made.document()["metrics"]["loss"]["steps"] == list(range(1, 21))
    for event in job_events("mine-1", began=1_700_000_060.0):
        if isinstance(event, events.Progress) and event.step > 20:
            made.apply(event)
    assert made.document()["metrics"]["loss"]["steps"] == list(range(1, 41))


def test_what_is_kept_of_a_long_job_is_limited() -> None:
    made = history(job_events("mine-1", 20_000))
    document = made.document()
    assert LINES <= len(document["lines"]) <= 2 * LINES
    assert document["dropped"] + len(document["lines"]) == 20_000
    assert len(document["checkpoints"]) == CHECKPOINTS
    assert document["checkpoints"][-1]["step"] == 20_000
    spans = document["ranks"]["worker/1"]["spans"]
    assert len(spans) <= SPANS
    assert [18, "lost", ()] in spans, "a state is kept before a change of load"


def test_text_of_other_machines_has_no_control_sequences() -> None:
    made = history(job_events("mine-1", hostile=HOSTILE))
    made.apply(failed("mine-1", 40, hostile=HOSTILE))
    text = json.dumps(made.document(), ensure_ascii=False)
    for hidden in ("\x1b", "\\u001b", "\\u0007", "\u2028", "[31m"):
        assert hidden not in text
    assert made.document()["failure"]["exception"].startswith("ValueError: </script>")


def test_how_a_worker_divides_its_time_is_part_of_its_timeline() -> None:
    made = history(job_events("mine-1"))
    for time, parts in ((200.0, {"compute": 61, "load": 22}), (210.0, {"compute": 59, "load": 20}), (220.0, {})):
        made.apply(
            events.StateChanged(
                time=1_700_000_000.0 + time, role="worker", rank=0, host="node-0", state="running", sync=30, parts=parts
            )
        )
    spans = made.document()["ranks"]["worker/0"]["spans"]
    assert spans[-2:] == [[200.0, "running", (60, 0, 20, 0, 0)], [220.0, "running", (70, 30, 0, 0, 0)]]


def test_the_newest_steps_have_the_parts_of_each_worker_and_the_critical_path() -> None:
    document = newest_steps()
    assert document["seconds"] == 150e-6
    assert [part[0] for part in document["lanes"]["worker/0"]] == ["load", "forward", "backward", "synchronize"]
    assert document["lanes"]["worker/1"][0] == ["compute", 7, 5e-6, 130e-6]
    (path,) = document["paths"]
    assert path["last"] == "worker/1 on node-1"
    assert round(path["behind"] * 1e6) == 30
    assert document["clock_error"] == 20e-6


def test_a_job_that_has_ended_shows_the_last_steps_of_its_workers() -> None:
    history = JobHistory("mine-1", "lab")
    for event in job_events("mine-1", 40):
        history.apply(event)
    assert history.document()["steps"] is None
    spans = [("push", 40, 90, 140), ("step", 40, 0, 150), ("teapot", 40, 0, 1)]
    for rank, exact in ((0, True), (1, False)):
        last = events.LastSteps(time=1.0, rank=rank, host=f"node-{rank}", spans=spans, exact=exact)
        history.apply(last)
    steps = history.document()["steps"]
    assert steps["lanes"] == {f"worker/{rank}": [["push", 40, 0.0, 0.0]] for rank in range(2)}
    assert [path["step"] for path in steps["paths"]] == [40]
    assert steps["clock_error"] is None, "of node-1 it is not known"
    history.apply(events.Restored(time=2.0, checkpoint="mine-1@30", step=30))
    assert history.document()["steps"] is None


def test_the_flows_between_hosts_and_the_gpus_are_shown() -> None:
    history = JobHistory("mine-1", "lab")
    for event in job_events("mine-1", 3):
        history.apply(event)
    document = history.document()
    assert document["flows"] == [["node-0", "node-1", 4e6], ["node-1", "node-0", 3e6]]
    assert document["gpus"] == {"node-0": [["NVIDIA H100 80GB HBM3", 97, 61 << 30, 80 << 30]] * 2}
