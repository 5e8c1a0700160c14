"""Tables: tab-separated rows in a pipe, aligned columns at a terminal, harmless cells in both."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from psctl.view import tables
from psctl.view.console import make_console
from psctl.view.doctor_table import draw_doctor
from psctl.view.text import clock_time


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def piped(draw, document):
    stream = io.StringIO()
    draw(make_console(stream, environment={}), document)
    return [line.split("\t") for line in stream.getvalue().splitlines()]


def shown(draw, document, width=100):
    stream = Screen()
    console = make_console(stream, environment={"TERM": "xterm-256color"})
    console.size = (width, 40)
    draw(console, document)
    return Text.from_ansi(stream.getvalue()).plain


UP = {
    "hosts": [
        {"name": "a", "state": "created", "actions": ["send psctl (1.2 MB)", "make envs/x"], "error": None},
        {"name": "b", "state": "unchanged", "actions": [], "error": None},
        {
            "name": "c",
            "state": "failed",
            "actions": [],
            "error": {"code": "disk-full", "message": "full", "hint": "free"},
        },
    ]
}
DOCTOR = {
    "hosts": [
        {
            "name": "a",
            "checks": [
                {"check": "python", "ok": True, "detail": "3.11.9", "cure": None},
                {"check": "torch", "ok": False, "detail": "none found", "cure": "psctl up"},
            ],
        }
    ]
}
STATUS = {
    "jobs": [
        {
            "job": "digits-3",
            "state": "running",
            "step": 120,
            "started": 1700000000.0,
            "ranks": [
                {
                    "role": "worker",
                    "rank": 0,
                    "host": "a",
                    "pid": 7,
                    "state": "running",
                    "step": 120,
                    "last_error": None,
                },
                {"role": "server", "rank": 0, "host": "b", "pid": 8, "state": "lost", "step": 0, "last_error": "x\ty"},
            ],
        }
    ],
    "hosts": [
        {
            "name": "a",
            "state": "ready",
            "cores": 8,
            "gpus": 0,
            "problems": ["clock is 3 s off"],
            "labels": {"rack": "r1"},
        }
    ],
}
CHECKPOINTS = {
    "checkpoints": [
        {
            "id": "digits-3@500", "job": "digits-3", "step": 500, "time": 1700000000.0, "bytes": 12_100_000,
            "complete": True, "metrics": {"loss": 0.25, "accuracy": None},
        },
        {
            "id": "digits-3@1000", "job": "digits-3", "step": 1000, "time": 1700000100.0, "bytes": 0,
            "complete": False, "metrics": {}, "verified": False, "problems": ["state.json is missing"],
        },
    ]
}  # fmt: skip
PLAN = {
    "size": 160_000_000, "world": 4, "chosen": "ps", "reason": "fastest of 2", "decided": False,
    "candidates": [
        {
            "strategy": "ps", "params": {}, "seconds": 0.52, "steps": 2, "bytes_per_rank": 3.2e8,
            "bottleneck": "node-a NIC", "feasible": True, "why_not": None,
        },
        {
            "strategy": "ring", "params": {}, "seconds": None, "steps": None, "bytes_per_rank": None,
            "bottleneck": None, "feasible": False, "why_not": "2 ranks are too few",
        },
    ],
}  # fmt: skip
DRY = {
    "job": "digits-4",
    "processes": [{"role": "worker", "rank": 0, "host": "a"}],
    "hosts": [{"name": "a", "address": "10.0.0.1", "interface": "", "actions": ["send the job's folder (3 kB)"]}],
    "files": [{"path": "train.py", "bytes": 1200}],
    "ports": "29400-29499",
    "plan": PLAN,
}


def test_up_in_a_pipe():
    assert piped(tables.draw_up, UP) == [
        ["host", "state", "actions"],
        ["a", "created", "send psctl (1.2 MB); make envs/x"],
        ["b", "unchanged", "nothing to do"],
        ["c", "failed", "full (free)"],
    ]


def test_doctor_in_a_pipe_has_every_check_and_the_cure():
    assert piped(draw_doctor, DOCTOR) == [
        ["host", "ok", "check", "detail"],
        ["a", "ok", "python", "3.11.9"],
        ["a", "failed", "torch", "none found -> psctl up"],
    ]


def test_doctor_at_a_terminal_folds_what_is_right():
    text = shown(draw_doctor, DOCTOR)
    assert "1 check " in text
    assert "python 3.11.9" in text
    assert "none found -> psctl up" in text


SEVERAL = {
    "hosts": [
        {
            "name": name,
            "checks": [
                {"check": "ssh", "ok": True, "detail": f"10.0.0.{place}", "cure": ""},
                {"check": "torch", "ok": True, "detail": "2.13.0", "cure": ""},
                {"check": "disk", "ok": name != "b", "detail": "2 GB left", "cure": "" if name != "b" else "free 8 GB"},
            ][: 1 if name == "c" else 3],
        }
        for place, name in enumerate(("a", "b", "c", "d"))
    ]
}


def test_doctor_of_several_hosts_is_a_grid_with_failures_beneath():
    lines = [" ".join(line.split()) for line in shown(draw_doctor, SEVERAL).splitlines() if line.strip()]
    assert lines[0] == "host ssh torch disk"
    assert lines[2:] == ["a ✓ ✓ ✓", "b ✓ ✓ ✗", "c ✓ - -", "d ✓ ✓ ✓", "✗ b: disk: 2 GB left", "→ free 8 GB"]
    two = {"hosts": SEVERAL["hosts"][:2]}
    assert "on all hosts: torch 2.13.0" in shown(draw_doctor, two)


def test_doctor_has_no_grid_where_it_does_not_fit_or_details_are_wanted():
    for text in (shown(draw_doctor, SEVERAL, 20),
                 shown(lambda console, document: draw_doctor(console, document, details=True), SEVERAL)):  # fmt: skip
        assert "10.0.0.3" in text and "free 8 GB" in " ".join(text.split())


def test_status_in_a_pipe():
    rows = piped(tables.draw_status, STATUS)
    assert rows[0] == ["job", "state", "step", "started", "workers", "servers", "hosts"]
    assert rows[1][:3] + rows[1][4:] == ["digits-3", "running", "120", "1", "1", "a b"]
    assert rows[3] == ["digits-3", "worker/0", "a", "running", "120", "-", "-", "7", "-"]
    assert rows[4] == ["digits-3", "server/0", "b", "lost", "-", "-", "-", "8", "x y"]
    assert rows[6] == ["a", "ready", "8", "0", "rack=r1", "clock is 3 s off"]


def test_status_names_the_hosts_that_a_job_waits_for():
    waits = {"hosts": ["b", "c"], "since": 100.0, "until": 700.0}
    document = {**STATUS, "jobs": [{**STATUS["jobs"][0], "recovering": waits}]}
    text = shown(tables.draw_status, document, 200)
    since, until = clock_time(100.0), clock_time(700.0)
    assert f"digits-3 is recovering: it waits for b, c since {since}, until {until} at most" in text


def test_status_of_a_job_whose_steps_are_not_counted_has_its_last_line_and_what_it_uses():
    job = {**STATUS["jobs"][0], "step": None, "traffic": {"a": {"sent": 2e6, "received": 5e5}}}
    job["ranks"] = [{**job["ranks"][0], "cpu": 150, "memory": 10**9}]
    job["printed"] = {"rank": "worker/0", "time": 100.0, "text": "epoch 3\x1b[31m"}
    text = shown(tables.draw_status, {**STATUS, "jobs": [job]}, 200)
    assert f"digits-3: worker/0 printed at {clock_time(100.0)}: epoch 3" in text
    assert "150%" in text and "1 GB" in text and "2 MB/s" in text and "500 kB/s" in text


def test_checkpoints_in_a_pipe():
    rows = piped(tables.draw_checkpoints, CHECKPOINTS)
    assert [row[:1] + row[2:] for row in rows[1:]] == [
        ["digits-3@500", "12.1 MB", "complete", "-", "loss=0.25 accuracy=-"],
        ["digits-3@1000", "0 B", "damaged", "-", "state.json is missing"],
    ]


def test_plan_in_a_pipe_ends_with_the_choice():
    rows = piped(tables.draw_plan, PLAN)
    assert rows[1] == ["ps", "520 ms", "2", "320 MB", "node-a NIC"]
    assert rows[2] == ["ring", "-", "-", "-", "2 ranks are too few"]
    assert rows[-1] == ["160 MB of gradients, 4 ranks, before the run: ps, fastest of 2"]


def test_a_plan_shows_how_gradients_are_compressed():
    first, *rest = PLAN["candidates"]
    coded = [first | {"params": {"compression": "int8"}}, *rest]
    rows = piped(tables.draw_plan, PLAN | {"candidates": coded})
    assert rows[-1] == ["160 MB of gradients, int8, 4 ranks, before the run: ps, fastest of 2"]


def test_where_the_winner_changes_is_one_line():
    spans = [{"from": 0, "chosen": "one-shot"}, {"from": 42_000, "chosen": "ring"}, {"from": 3_000_000, "chosen": "ps"}]
    rows = piped(tables.draw_plan, PLAN | {"by_size": spans})
    assert rows[-2] == ["by size: one-shot up to 42 kB, ring up to 3 MB, ps above"]
    assert len(piped(tables.draw_plan, PLAN | {"by_size": spans[:1]})) == len(rows) - 1


def test_without_a_size_the_plan_is_a_table_of_winners():
    winners = [{"size": 1000, "chosen": "native", "seconds": 0.001}, {"size": 10**9, "chosen": "ps", "seconds": None}]
    rows = piped(tables.draw_plan, PLAN | {"size": None, "winners": winners})
    assert rows[-4:-1] == [["gradients", "fastest", "predicted"], ["1 kB", "native", "1 ms"], ["1 GB", "ps", "-"]]
    assert rows[-1] == ["gradients of unknown size, 4 ranks, before the run: ps, fastest of 2"]


def test_a_dry_run_shows_processes_hosts_files_ports_and_plan():
    rows = piped(tables.draw_dry_run, DRY)
    assert rows[0] == ["digits-4: nothing was started"]
    assert ["worker/0", "a"] in rows
    assert ["a", "10.0.0.1", "-", "send the job's folder (3 kB)"] in rows
    assert ["train.py", "1.2 kB"] in rows
    assert ["ports", "29400-29499"] in rows
    assert rows[-1] == ["160 MB of gradients, 4 ranks, before the run: ps, fastest of 2"]


def test_nothing_to_show_is_reported():
    assert piped(tables.draw_jobs, {"jobs": []}) == [["no jobs"]]
    assert piped(tables.draw_checkpoints, {"checkpoints": []}) == [["no checkpoints"]]


ALL = [
    (tables.draw_up, UP), (draw_doctor, DOCTOR), (draw_doctor, SEVERAL),
    (tables.draw_status, STATUS), (tables.draw_jobs, STATUS),
    (tables.draw_checkpoints, CHECKPOINTS), (tables.draw_plan, PLAN),
    (tables.draw_dry_run, DRY),
]  # fmt: skip
NAMES = ["up", "doctor", "grid", "status", "jobs", "checkpoints", "plan", "dry-run"]


@pytest.mark.parametrize(("draw", "document"), ALL, ids=NAMES)
@pytest.mark.parametrize("width", [20, 60, 100])
def test_at_a_terminal_no_table_is_cut(draw, document, width):
    text = shown(draw, document, width)
    assert "…" not in text
    seen = "".join(text.split())
    for row in piped(draw, document):
        if row[0] not in ("job", "host", "file", "process", "strategy", "checkpoint") and draw is not draw_doctor:
            assert all("".join(cell.split()) in seen for cell in row)


def test_a_table_too_wide_for_the_terminal_becomes_one_block_a_row():
    lines = [line.rstrip() for line in shown(tables.draw_up, UP, 30).splitlines()]
    assert lines[:3] == ["a", "  state    created", "  actions  send psctl (1.2 MB); make envs/x"]


def poisoned(value):
    if isinstance(value, dict):
        return {key: poisoned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return (
        f"[bold]{value}\x1b[2J\x1b]0;evil\x07\n\t[/x]"
        if isinstance(value, str) and value not in ("gpu", "nic")
        else value
    )


@pytest.mark.parametrize(("draw", "document"), ALL, ids=NAMES)
def test_hostile_cells_stay_in_their_cell(draw, document):
    rows = piped(draw, poisoned(document))
    text = "\n".join("\t".join(row) for row in rows)
    assert "\x1b" not in text
    assert "evil" not in text
    assert "[bold]" in text
    assert len(rows) == len(piped(draw, document))


def test_a_checkpoint_without_a_manifest_has_no_date_and_shows_what_it_lacks():
    torn = {"id": "digits-3@5", "time": 0, "bytes": 0, "complete": False, "metrics": {}, "problem": "no manifest.json"}
    assert piped(tables.draw_checkpoints, {"checkpoints": [torn]})[1] == [
        "digits-3@5", "-", "0 B", "torn", "-", "no manifest.json",
    ]  # fmt: skip


def test_what_is_not_known_of_a_job_is_not_counted():
    job = {"job": "d-1", "state": "unknown", "step": None, "started": 0.0, "ranks": [], "head": "h1"}
    row = piped(tables.draw_jobs, {"jobs": [job]})[1]
    assert [*row[:3], *row[4:]] == ["d-1", "unknown", "-", "-", "-", "h1"]
