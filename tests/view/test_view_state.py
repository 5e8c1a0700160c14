"""Events fold into the picture of a job: tables of events and what must be known after them."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest

from psctl.job import events as kinds
from psctl.view.job_view import HISTORY, JobView, watched_metric
from psctl.view.plain_log import describe
from psctl.view.rank_rows import rank_ranges, rank_rows

ROLES = [kinds.RoleOf("server", 0, "a"), kinds.RoleOf("worker", 0, "a"), kinds.RoleOf("worker", 1, "b")]
STARTED = kinds.Started(time=100.0, job="digits-3", hosts=["a", "b"], roles=ROLES)


def progress(time, step, **metrics):
    return kinds.Progress(
        time=time, step=step, epoch=1, metrics=metrics, examples_per_second=640.0, bytes_per_second=1e6,
        sync_seconds=0.01, compute_seconds=0.03, staleness=0,
    )  # fmt: skip


def rank(time, state, step=0, role="worker", rank=1, host="b", error="", pid=0):
    return kinds.StateChanged(
        time=time, role=role, rank=rank, host=host, state=state, step=step, last_error=error, pid=pid
    )


def after(*events):
    state = JobView()
    for event in events:
        state.apply(event)
    return state


def checked(fastest, changes):
    return kinds.PlanChecked(
        time=110.0, step=28, steps=21, chosen="one-shot", predicted=0.02, measured=0.1, compute=0.01, fastest=fastest,
        fastest_seconds=0.1 if fastest == "one-shot" else 0.015, changes=changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fastest", "changes", "said", "line"),
    [
        ("one-shot", False, "", ""),
        ("ps", False, "; with ps it would take 15 ms", " faster=ps:15ms"),
        (
            "ps",
            True,
            "; with ps it would take 15 ms, so the job changes to it at a checkpoint",
            " faster=ps:15ms changes=yes",
        ),
    ],
)
def test_a_step_that_differs_from_the_plan_is_said(fastest, changes, said, line):
    event = checked(fastest, changes)
    (note,) = after(STARTED, event).recent(1)
    assert note.text == "a step takes 100 ms with one-shot, where the plan predicts 20 ms" + said
    assert describe(event) == "plan-check strategy=one-shot step=100ms predicted=20ms compute=10ms" + line


def test_started_has_the_host_of_every_rank():
    state = after(STARTED)
    assert (state.job, state.hosts, state.state, state.started) == ("digits-3", ["a", "b"], "starting", 100.0)
    assert {r.name: (r.host, r.state) for r in state.ranks.values()} == {
        "server/0": ("a", "starting"),
        "worker/0": ("a", "starting"),
        "worker/1": ("b", "starting"),
    }
    assert (state.host_of("worker/1"), state.host_of("worker/9"), state.host_of("nonsense")) == ("b", "", "")


def test_states_move_ranks_and_the_job():
    state = after(
        STARTED, rank(101.0, "running", pid=77), rank(102.0, "waiting", step=5), rank(1, "running", role="job")
    )
    assert state.state == "running"
    found = state.ranks["worker", 1]
    assert (found.state, found.pid, found.step) == ("waiting", 77, 5)


def test_the_time_that_is_left_follows_the_pace_of_the_last_minute():
    def at(time, step):
        return msgspec.structs.replace(progress(time, step, loss=1.0), total=1000)

    assert math.isnan(after(STARTED, at(101.0, 10)).seconds_left), "one event has no pace"
    fast = [at(101.0 + i, 10 * i) for i in range(1, 11)]
    assert after(STARTED, *fast).seconds_left == pytest.approx(90.0)
    slow = [at(111.0 + 10 * i, 100 + i) for i in range(1, 20)]
    assert after(STARTED, *fast, *slow).seconds_left == pytest.approx((1000 - 119) * 10.0, rel=0.02)
    again = kinds.Restored(time=400.0, checkpoint="digits-3@50", step=50, lost=60)
    assert math.isnan(after(STARTED, *fast, again, at(401.0, 51)).seconds_left), "the pace before it says nothing"
    assert math.isnan(after(STARTED, progress(101.0, 1, loss=1.0), progress(102.0, 9, loss=1.0)).seconds_left)


def test_a_ranks_rate_is_its_own_steps_over_its_own_time():
    state = after(STARTED, rank(101.0, "running", step=10), rank(103.0, "running", step=50))
    assert state.ranks["worker", 1].rate == 20.0
    state.apply(rank(104.0, "waiting", step=60))
    assert state.rate_of(state.ranks["worker", 1]) == 0.0


def test_a_ranks_rate_counts_from_where_it_trains_not_from_its_start():
    waited = (rank(101.0, "running"), rank(110.0, "waiting"), rank(118.0, "running"))
    state = after(STARTED, *waited, rank(119.0, "running", step=40))
    assert state.ranks["worker", 1].rate == 40.0


def test_ranks_that_report_no_steps_have_at_least_the_jobs():
    state = after(STARTED, rank(101.0, "running"), progress(102.0, 10), progress(104.0, 30))
    worker, server = state.ranks["worker", 1], state.ranks["server", 0]
    assert (state.step_of(worker), state.rate_of(worker)) == (30, 10.0)
    assert (state.step_of(server), state.rate_of(server)) == (0, 0.0)


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"accuracy": 1.0, "loss": 2.0}, "loss"),
        ({"accuracy": 1.0, "train_loss": 2.0}, "train_loss"),
        ({"accuracy": 1.0, "f1": 2.0}, "accuracy"),
        ({}, ""),
    ],
)
def test_the_watched_metric_is_the_loss_or_the_first(metrics, name):
    assert watched_metric(metrics) == name


def test_the_curve_leaves_out_values_that_are_no_numbers_or_were_shown_before():
    state = after(
        progress(1.0, 1, loss=3.0),
        progress(2.0, 1, loss=3.0),
        progress(3.0, 2, loss=math.nan),
        progress(4.0, 3, loss=1.0),
    )
    assert state.history.values == [3.0, 1.0]
    assert state.progress is not None
    assert state.progress.step == 3


def test_the_curve_keeps_the_whole_run_in_bounded_room():
    state = JobView()
    for step in range(10_000):
        state.apply(progress(float(step), step, loss=float(step)))
    curve = state.history.values
    assert HISTORY // 2 - 1 <= len(curve) <= HISTORY
    assert curve[0] == 0.0
    assert curve[-1] > 9800.0
    gaps = [b - a for a, b in itertools.pairwise(curve)]
    assert max(gaps) <= 2 * min(gaps)


def test_a_restore_takes_back_what_came_after_its_step():
    state = after(
        STARTED, progress(1.0, 10, loss=3.0), progress(2.0, 20, loss=2.0), progress(3.0, 30, loss=1.0),
        kinds.Restored(time=110.0, checkpoint="digits-3@20", step=20),
    )  # fmt: skip
    assert state.history.values == [3.0, 2.0]
    assert state.progress is None
    assert state.ranks["worker", 0].step == 20
    assert state.recent(1)[0].text == "continues from digits-3@20 (step 20)"


def test_news_come_worst_first_and_old_ones_go_unless_they_are_errors():
    state = after(
        STARTED,
        kinds.Notice(time=101.0, text="old notice"),
        kinds.ServerLost(time=102.0, rank=0, host="a", reason="killed by signal 9"),
        kinds.Notice(time=900.0, text="worker/1 is slow"),
        kinds.WorkerJoined(time=901.0, rank=1, host="b"),
    )
    assert [h.text for h in state.recent(9)] == [
        "server/0 on a was lost: killed by signal 9",
        "worker/1 is slow",
        "worker/1 on b takes part",
    ]
    assert [h.text for h in state.recent(1)] == ["server/0 on a was lost: killed by signal 9"]
    assert state.ranks["server", 0].state == "lost"


def test_the_same_news_again_is_counted():
    state = after(STARTED, *(kinds.Notice(time=101.0 + i, text="worker/1 is slow") for i in range(3)))
    assert [(h.text, h.count, h.time) for h in state.recent(9)] == [("worker/1 is slow", 3, 103.0)]


def test_a_failed_rank_is_news_with_its_reason_and_a_new_start_forgets_it():
    state = after(STARTED, rank(101.0, "failed", error="ValueError: \x1b[31mNaN"))
    assert state.recent(1)[0].text == "worker/1 on b failed: ValueError: NaN"
    state.apply(rank(105.0, "running"))
    assert state.ranks["worker", 1].last_error == ""


def test_the_end_is_the_jobs_state():
    end = kinds.Finished(time=130.0, status="failed", exit=1, steps=7, seconds=30.0, metrics={})
    assert after(STARTED, end).state == "failed"


def test_plan_and_checkpoint_are_kept():
    plan = kinds.Planned(time=1.0, size=1, world=2, chosen="ps", reason="r", decided=True, candidates=[])
    written = kinds.CheckpointWritten(time=2.0, step=5, path="/x", bytes=3, seconds=0.1)
    state = after(plan, written)
    assert (state.plan, state.checkpoint) == (plan, written)


def many(count):
    return kinds.Started(
        time=1.0, job="j-1", hosts=["a"], roles=[kinds.RoleOf("worker", i, f"h{i // 8}") for i in range(count)]
    )


def test_few_ranks_have_a_row_each_workers_first():
    assert [row.rank for row in rank_rows(after(STARTED), 3)] == ["worker/0", "worker/1", "server/0"]


def test_many_ranks_are_grouped_and_the_failed_one_stays_single():
    events = [rank(2.0, "running", step=100, rank=i, host=f"h{i // 8}") for i in range(64)]
    state = after(many(64), *events, rank(3.0, "failed", step=90, rank=17, host="h2", error="boom"))
    state.apply(rank(3.0, "running", step=95, rank=5, host="h0"))
    rows = rank_rows(state, 6)
    assert [(r.rank, r.host, r.state, r.steps) for r in rows] == [
        ("worker/17", "h2", "failed", (90, 90)),
        ("63 workers", "8 hosts", "running", (95, 100)),
    ]
    assert rows[1].error == "slowest worker/5 on h0"


def test_more_trouble_than_rows_is_grouped_too():
    state = after(many(64), *(rank(2.0, "lost", rank=i, host="h") for i in range(64)))
    assert [(r.rank, r.state) for r in rank_rows(state, 4)] == [("64 workers", "lost")]
    assert len(rank_rows(state, 1)) == 1


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["worker/0", "worker/1", "worker/2", "server/1"], "worker/0-2, server/1"),
        (["worker/3", "worker/0", "worker/1"], "worker/0-1, worker/3"),
        (["worker/2", "worker/2"], "worker/2"),
        (["coordinator"], "coordinator"),
        ([], ""),
    ],
)
def test_names_are_shown_as_ranges(names, text):
    assert rank_ranges(names) == text


def test_a_wait_for_hosts_is_known_until_it_is_over():
    waits = kinds.Recovering(time=110.0, hosts=["b"], since=110.0, until=710.0)
    assert after(STARTED, waits).recovering == waits
    for over in (kinds.Recovered(time=150.0), rank(150.0, "starting", rank=0, role="job")):
        assert after(STARTED, waits, over).recovering is None
