"""-r worker:3|server, variables from the shell, notes in a job file."""

from __future__ import annotations

import pytest

from psctl import errors
from psctl.launch.checkpoints.checkpoint_actions import split
from psctl.launch.jobs.job_logs import RankSelector
from psctl.launch.jobs.prepare import load_requested_job
from psctl.launch.jobs.submit import secrets_of, variables
from psctl.spec.job import JobSpec

RANKS = ["worker/0", "worker/1", "worker/12", "server/0", "server/1", "coordinator/0"]


@pytest.mark.parametrize(
    ("text", "taken", "prefixes"),
    [
        ("", RANKS, [""]),
        ("worker", ["worker/0", "worker/1", "worker/12"], ["worker-"]),
        ("worker:1", ["worker/1"], ["worker-1."]),
        ("worker:0-1,12", ["worker/0", "worker/1", "worker/12"], ["worker-0.", "worker-1.", "worker-12."]),
        ("server,worker:0", ["worker/0", "server/0", "server/1"], ["server-", "worker-0."]),
        ("worker:1,worker", ["worker/0", "worker/1", "worker/12"], ["worker-"]),
    ],
)
def test_roles_and_ranks_are_selected(text: str, taken: list[str], prefixes: list[str]) -> None:
    selector = RankSelector(text)
    assert [rank for rank in RANKS if selector.takes(rank)] == taken
    assert selector.prefixes() == prefixes


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("", []),
        ("worker", []),
        ("worker:1,12", []),
        ("worker:1-3,server:0", ["worker/2", "worker/3"]),
        ("coordinator,server", []),
    ],
)
def test_ranks_that_a_job_does_not_have_are_found(text: str, absent: list[str]) -> None:
    assert RankSelector(text).absent(RANKS) == absent
    assert RankSelector("server,worker").absent(["worker/0"]) == ["server"]


def test_a_range_without_end_is_refused_at_once() -> None:
    with pytest.raises(errors.UsageError, match="too many ranks"):
        RankSelector("worker:0-99999999999")


@pytest.mark.parametrize("text", ["workers", "worker:x", "worker:1-", "rank0", "worker:"])
def test_what_is_no_role_is_refused_with_examples(text: str) -> None:
    with pytest.raises(errors.UsageError) as raised:
        RankSelector(text)
    assert "worker" in raised.value.hint


def test_checkpoints_are_named_by_job_and_step() -> None:
    assert split("digits-3@500") == ("digits-3", "500")
    assert split("digits@best") == ("digits", "best")
    for wrong in ("digits-3", "digits-3@", "@5", "digits-3@newest", "a@b@5"):
        with pytest.raises(errors.UsageError):
            split(wrong)


def test_variables_come_from_the_cluster_the_job_and_the_command_line_in_this_order() -> None:
    job = JobSpec(name="digits", script="t.py", env={"A": "job", "B": None, "C": "job"})
    found = variables(job, {"A": "cluster", "D": "cluster"}, {"C": "line"}, {"B": "shell"})
    assert found == {"A": "job", "B": "shell", "C": "line", "D": "cluster"}


def test_a_variable_that_the_shell_lacks_or_that_is_psctls_own_is_refused() -> None:
    job = JobSpec(name="digits", script="t.py", env={"HF_TOKEN": None}, secrets=("KEY",))
    with pytest.raises(errors.UsageError, match="HF_TOKEN is taken from your shell, but it is not set there"):
        variables(job, {}, {}, {})
    with pytest.raises(errors.UsageError, match="psctl sets this variable itself"):
        variables(job, {}, {"RANK": "1"}, {"HF_TOKEN": "x"})
    with pytest.raises(errors.UsageError, match="KEY"):
        secrets_of(job, {})
    assert secrets_of(job, {"KEY": "s"}) == {"KEY": "s"}


def test_options_are_kept_for_a_restore_except_for_numbers_of_processes() -> None:
    text = "name: digits\nscript: train.py\n"
    wanted = load_requested_job(text, "job.yaml", ["seed=7", "workers=2", "sync.strategy=ps"], ["A=1"])
    assert (wanted.job.seed, wanted.job.workers, wanted.job.sync.strategy) == (7, 2, "ps")
    again = load_requested_job(wanted.text, "job.yaml", ["seed=9"], [])
    assert (again.job.seed, again.job.workers, again.job.sync.strategy, again.env) == (9, "auto", "ps", {"A": "1"})
    assert again.text.count("--set seed") == 2
    assert load_requested_job(text, "job.yaml", [], []).text == text
