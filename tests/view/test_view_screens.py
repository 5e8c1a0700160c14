"""Screens rendered to text of a fixed width: what a person or a pipe gets to see."""

from __future__ import annotations

import io
import threading

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from psctl import errors
from psctl.job import events as kinds
from psctl.view.console import Glyphs, make_console, rank_lines, say
from psctl.view.failure import UncountedSteps, draw_end, draw_error, signal_name
from psctl.view.job_view import JobView
from psctl.view.live_picture import picture
from psctl.view.live_screen import BURST, LiveScreen, make_screen
from psctl.view.plain_log import PlainLog, describe
from tests.helpers.emulated_terminal import EmulatedTerminal
from tests.helpers.manual_clock import ManualClock


def pipe():
    stream = io.StringIO()
    return stream, make_console(stream, environment={})


def terminal(width=100, height=30, **environment):
    stream = EmulatedTerminal(width, height)
    console = make_console(stream, environment={"TERM": "xterm-256color", **environment})
    console.size = (width, height)
    return stream, console


STARTED = kinds.Started(
    time=100.0, job="digits-3", hosts=["node-a", "node-b"],
    roles=[kinds.RoleOf("server", 0, "node-a"), *(kinds.RoleOf("worker", i, "node-b") for i in range(2))],
)  # fmt: skip
PLANNED = kinds.Planned(time=101.0, size=1, world=2, chosen="ps", reason="2 hosts", decided=True, candidates=[])
WRITTEN = kinds.CheckpointWritten(time=160.0, step=1000, path="/ck/digits-3/0000001000", bytes=12_100_000, seconds=0.31)


def progress(time, step, loss):
    return kinds.Progress(
        time=time, step=step, epoch=3, metrics={"accuracy": 0.5, "loss": loss}, examples_per_second=12345.0,
        bytes_per_second=48.2e6, sync_seconds=0.0041, compute_seconds=0.0141, staleness=0,
    )  # fmt: skip


RUN = [
    STARTED,
    *(
        kinds.StateChanged(time=102.0, role="worker", rank=i, host="node-b", state="running", pid=70 + i)
        for i in range(2)
    ),
    kinds.StateChanged(time=102.0, role="job", rank=0, host="", state="running"),
    PLANNED,
    *(progress(110.0 + i, 100 * i, 2.0 - i / 10) for i in range(1, 12)),
    WRITTEN,
    kinds.Notice(time=170.0, text="worker/1 is slow: step 1,100 since 32 s, in sync"),
]


def test_the_table_has_the_staleness_of_a_workers_values_where_workers_are_apart():
    late = kinds.StateChanged(
        time=171.0, role="worker", rank=1, host="node-b", state="running", pid=71, step=7, staleness=3
    )
    assert not any(" stale " in line for line in drawn(RUN, 100, 30))
    lines = drawn([*RUN, late], 100, 30)
    head = next(line for line in lines if " stale " in line)
    row = next(line for line in lines if line.startswith("worker/1"))
    assert row[head.index("stale") : head.index("stale") + 5].strip() == "3"


def test_the_table_has_processor_memory_and_share_of_synchronization_where_there_is_room():
    used = kinds.StateChanged(
        time=171.0, role="worker", rank=1, host="node-b", state="running", pid=71, step=7, cpu=187,
        memory=2_100_000_000, sync=23, sends=62.5e6, receives=1.5e6, gpu=87, gpu_memory=61_000_000_000,
    )  # fmt: skip
    lines = drawn([*RUN, used], 100, 30)
    head = next(line for line in lines if line.startswith("rank"))
    row = next(line for line in lines if line.startswith("worker/1"))
    assert head.split()[5:9] == ["cpu", "memory", "sync", "gpu"]
    assert " 87%" in row and "61 GB" in row
    assert "62.5 MB/s" not in row, "there is no room for it"
    narrow = drawn([*RUN, used], 80, 30)
    assert max(map(len, narrow)) <= 80
    assert next(line for line in narrow if line.startswith("rank")).split()[5:] == ["cpu", "memory", "sync", "gpu"]
    wide = drawn([*RUN, used], 120, 30)
    columns = next(line for line in wide if line.startswith("rank")).split()
    assert columns[8:12] == ["gpu", "gpu", "memory", "sends"] and columns[12] == "receives"
    assert "62.5 MB/s" in (found := next(line for line in wide if line.startswith("worker/1"))) and "1.5 MB/s" in found
    assert not any(" gpu " in line for line in drawn(RUN, 120, 30)), "no process uses one"
    assert " 187%" in row and "2.1 GB" in row and " 23%" in row
    assert not any(" cpu " in line for line in drawn([*RUN, used], 60, 30))


def state_of(events):
    state = JobView()
    for event in events:
        state.apply(event)
    return state


def drawn(events, width, height, hint="Ctrl-C: detach", encoding="utf-8"):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, color_system=None)
    glyphs = Glyphs(console)
    with console.capture() as capture:
        console.print(picture(state_of(events), width, height, 3.0, hint, glyphs))
    return capture.get().splitlines()


def test_the_live_picture_shows_all_that_matters():
    lines = [line.rstrip() for line in drawn(RUN, 100, 20)]
    assert lines[1] == "digits-3  running  1m13s  ps  on 2 hosts"
    assert lines[2] == "step        1,100 · epoch 3 · 12.3k examples/s · 100 steps/s · 48.2 MB/s"
    assert lines[3] == "loss        0.9  █▇▇▆▅▄▄▃▂▁▁  accuracy 0.5".replace("█▇▇▆▅▄▄▃▂▁▁", lines[3].split()[2])
    assert len(lines[3].split()[2]) == 11
    assert lines[4].endswith("compute 14.1 ms, sync 4.1 ms")
    assert lines[5] == "checkpoint  step 1,000, 13 s ago, 12.1 MB in 310 ms"
    assert [line.split()[:4] for line in lines[7:11]] == [
        ["rank", "host", "state", "step"],
        ["worker/0", "node-b", "running", "1,100"],
        ["worker/1", "node-b", "running", "1,100"],
        ["server/0", "node-a", "starting", "-"],
    ]
    assert "worker/1 is slow" in lines[12]
    assert lines[13] == "Ctrl-C: detach"


def test_a_large_terminal_has_charts_and_how_each_worker_divides_its_time():
    divided = kinds.StateChanged(
        time=171.0, role="worker", rank=1, host="node-b", state="running", pid=71, step=7, cpu=187,
        memory=2_100_000_000, sync=20, parts={"compute": 60, "sync": 20, "load": 10},
    )  # fmt: skip
    lines = drawn([*RUN, divided], 200, 60)
    titles = next(line for line in lines if line.startswith("loss over steps (log scale)"))
    assert titles.split()[-1] == "examples/s" and titles.index("examples/s") > 90
    head = next(line for line in lines if line.startswith("rank"))
    row = next(line for line in lines if line.startswith("worker/1"))
    assert "█compute ░sync ▒load ▓update ▚checkpoint" in head
    at = head.index("█compute")
    assert row[at : at + 37].rstrip() == "█" * 24 + "░" * 8 + "▒" * 4
    assert not any("over steps" in line for line in drawn([*RUN, divided], 100, 16))


def test_the_effect_of_ctrl_c_is_never_cut():
    hint = (
        "detaching from char-gpt-12, which continues. Come back: psctl attach char-gpt-12. Stop it: psctl stop "
        "char-gpt-12, or press Ctrl-C again within 3 s (checkpoint, then stop)"
    )
    for width in (40, 80, 200):
        assert hint in " ".join(" ".join(drawn(RUN, width, 24, hint)).split())


def test_the_parts_of_a_step_are_never_cut_where_a_bar_is_what_can_be_left_out():
    hidden = msgspec.structs.replace(RUN[-3], hidden_seconds=0.0413)
    for width in (60, 80):
        assert any(
            "compute 14.1 ms, sync 4.1 ms and 41.3 ms hidden" in line for line in drawn([*RUN, hidden], width, 24)
        )


@pytest.mark.parametrize("events", [[], RUN[:1], RUN[:4], RUN], ids=["nothing", "started", "running", "whole"])
@pytest.mark.parametrize(("width", "height"), [(100, 30), (60, 20), (40, 12), (20, 6), (200, 60)])
def test_the_live_picture_fits_every_terminal(events, width, height):
    hint = "Ctrl-C: detach (the job continues); again within 3 s: save and stop"
    lines = drawn(events, width, height, hint)
    assert all(len(line) <= width for line in lines)
    if height >= 12:
        assert len(lines) < height


def test_sixty_four_ranks_fit_a_small_terminal():
    roles = [kinds.RoleOf("worker", i, f"node-{i // 8}") for i in range(64)]
    started = kinds.Started(time=100.0, job="big-1", hosts=[f"node-{i}" for i in range(8)], roles=roles)
    states = [kinds.StateChanged(time=101.0, role="worker", rank=i, host="", state="running") for i in range(63)]
    lines = drawn([started, *states, *RUN[3:]], 60, 20)
    assert len(lines) < 20
    assert any(line.startswith("63 workers") and "8 hosts" in line for line in lines)
    assert any(line.startswith("worker/63") and "starting" in line for line in lines)


def moved(role, rank, state="running", time=102.0):
    return kinds.StateChanged(time=time, role=role, rank=rank, host="", state=state)


def test_before_the_first_report_it_shows_the_phase_and_since_when_it_lasts():
    assert "waiting for the hosts" in drawn([], 80, 24)[2]
    assert "starting: 0 of 3 processes run" in drawn(RUN[:1], 80, 24)[2]
    events = [STARTED, moved("server", 0), moved("worker", 0), moved("worker", 1)]
    assert drawn(events, 80, 24)[2].endswith(" importing (without psctl.init steps are not counted), 3 s")
    events += [kinds.WorkerJoined(time=103.0, rank=0, host="node-b")]
    assert drawn(events, 80, 24)[2].endswith(" importing: 1 of 2 workers have called psctl.init, 4 s")
    events += [kinds.WorkerJoined(time=104.0, rank=1, host="node-b"), PLANNED, moved("worker", 0, "waiting", 106.0)]
    assert drawn(events, 80, 24)[2].endswith(" loading data and model: 1 of 2 workers have called prepare, 5 s")
    events += [moved("worker", 1, "waiting", 107.0)]
    assert drawn(events, 80, 24)[2].endswith(" connecting: 0 of 2 workers have their first values, 3 s")
    events += [moved("worker", i, "running", 108.0) for i in range(2)]
    assert drawn(events, 80, 24)[2].endswith(" training: no step is reported yet, 3 s")
    again = [*events, moved("worker", 1, "starting", 109.0)]
    assert drawn(again, 80, 24)[2].endswith(" starting: 2 of 3 processes run, 3 s")
    again += [moved("worker", 1, "running", 110.0)]
    assert drawn(again, 80, 24)[2].endswith(" importing: 1 of 2 workers have called psctl.init, 3 s")
    assert all(len(line.rstrip()) <= 40 for line in drawn(events, 40, 24))


def test_a_script_whose_steps_are_not_counted_is_shown_by_what_it_prints_and_sends():
    events = [STARTED, moved("server", 0), moved("worker", 0), moved("worker", 1)]
    events += [
        kinds.Log(time=103.0, rank="worker/1", stream="stdout", text="iteration 1"),
        kinds.Log(time=104.0, rank="worker/0", stream="stdout", text="iteration 2"),
        kinds.Log(time=105.0, rank="worker/1", stream="stdout", text="iteration 1"),
        kinds.HostTraffic(time=106.0, host="node-b", sent=2e6, received=1e6),
    ]
    lines = drawn(events, 80, 24)
    assert "running (without psctl.init steps are not counted)" in lines[2]
    assert lines[3].split() == ["output", "5", "s", "ago:", "iteration", "2"]
    assert "node-b sends 2 MB/s, receives 1 MB/s" in lines[4]


def test_the_live_picture_names_the_hosts_that_the_job_waits_for():
    waits = kinds.Recovering(time=200.0, hosts=["b"], since=200.0, until=800.0)
    line = next(line for line in drawn([*RUN[:3], waits], 80, 24) if "recovering" in line)
    assert "waiting for b since 3 s, 9m57s more at most" in line


def test_a_script_that_never_calls_prepare_shows_no_steps():
    up = [kinds.StateChanged(time=101.0, role=r.role, rank=r.rank, host="", state="running") for r in RUN[0].roles]
    late = kinds.Notice(time=165.0, text="worker/0 is slow")
    assert "running (without psctl.init steps are not counted), 1m07s" in drawn([RUN[0], *up, late], 80, 24)[2]


def test_the_step_is_the_workers_when_they_report_rarely():
    worker = kinds.StateChanged(time=171.0, role="worker", rank=0, host="", state="running", step=1777)
    assert "1,777" in drawn([*RUN, worker], 80, 24)[2]


@pytest.mark.parametrize(
    ("status", "text", "line"),
    [
        ("done", "acc 0.93\x1b[2J", "✓ digits-3 done in 3m12s; worker/0 printed last: acc 0.93"),
        ("stopped", None, "■ digits-3 stopped in 3m12s"),
    ],
)
def test_a_job_without_counted_steps_does_not_end_with_none(status, text, line):
    stream, console = pipe()
    printed = text and kinds.Log(time=1.0, rank="worker/0", stream="stdout", text=text)
    draw_end(console, "digits-3", ended(status), uncounted=UncountedSteps(printed))
    assert stream.getvalue().splitlines()[-1] == line


def test_a_live_screen_prints_rank_lines_above_and_takes_its_picture_away():
    stream, console = terminal()
    clock = ManualClock()
    with LiveScreen(console, "Ctrl-C: detach", clock) as screen:
        for event in RUN:
            screen.on_event(event)
        screen.on_event(
            kinds.Log(time=171.0, rank="worker/1", stream="stdout", text="[rank1] \x1b]0;evil\x07hello [bold]")
        )
        screen.draw()
        assert "Ctrl-C: detach" in stream.lines()
        screen.set_hint("Ctrl-C again: stop")
        screen.draw()
        assert stream.lines()[-1] == "Ctrl-C again: stop"
        assert stream.screen.cursor.hidden
    assert stream.lines() == ["worker/1 node-b │ [rank1] hello [bold]"]
    assert "evil" not in stream.getvalue()
    assert not stream.screen.cursor.hidden
    assert not [thread for thread in threading.enumerate() if thread.name == "psctl-live-screen"]


def test_a_flood_of_lines_is_cut_and_counted():
    stream, console = terminal()
    screen = LiveScreen(console)
    for number in range(BURST + 30):
        screen.on_event(kinds.Log(time=1.0, rank="worker/0", stream="stdout", text=f"line {number}"))
    screen.draw()
    lines = stream.lines()
    assert lines[0] == "… 30 lines omitted here (psctl logs prints them)"
    assert lines[1].endswith("line 30")
    assert any(line.endswith(f"line {BURST + 29}") for line in lines)


def test_a_follower_is_live_at_a_terminal_and_plain_in_a_pipe_or_a_dumb_one():
    assert isinstance(make_screen(terminal()[1]), LiveScreen)
    assert isinstance(make_screen(pipe()[1]), PlainLog)
    assert isinstance(make_screen(terminal(TERM="dumb")[1]), PlainLog)


def test_plain_lines_are_one_an_event_and_progress_only_every_few_seconds():
    stream, console = pipe()
    with PlainLog(console) as log:
        for event in RUN:
            log.on_event(event)
        log.on_event(kinds.Log(time=171.0, rank="worker/1", stream="stderr", text="Epoch 1:\r\x1b[31mdone\nnext"))
    lines = [line[9:] if line[2] == ":" else line for line in stream.getvalue().splitlines()]
    assert lines[0] == "started digits-3: server/0, worker/0-1 on node-a, node-b"
    assert lines[1:3] == ["state running", "plan strategy=ps decided=true: 2 hosts"]
    steps = [line.split()[1] for line in lines if line.startswith("progress")]
    assert steps == ["step=100", "step=600", "step=1100"]
    assert lines[3] == (
        "progress step=100 epoch=3 accuracy=0.5 loss=1.9 examples_per_second=12345 compute=14.1ms sync=4.1ms hidden=0s"
    )
    assert "checkpoint step=1000 size=12.1MB seconds=0.31 path=/ck/digits-3/0000001000" in lines
    assert lines[-2:] == ["worker/1 node-b │ done", "worker/1 node-b │ next"]


def test_the_last_progress_is_always_printed():
    stream, console = pipe()
    log = PlainLog(console)
    log.on_event(progress(100.0, 1, 2.0))
    log.on_event(progress(101.0, 2, 1.0))
    log.on_event(kinds.Finished(time=101.0, status="done", exit=0, steps=2, seconds=1.0, metrics={}))
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["step=1", "step=2"]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (kinds.CheckpointCopied(time=1.0, step=5, place="s3://a/d-3/5"), "checkpoint-copied step=5 place=s3://a/d-3/5"),
        (kinds.WorkerLost(time=1.0, rank=3, host="b", reason="no\nanswer"), "worker-lost worker/3 b: no answer"),
        (kinds.ServerLost(time=1.0, rank=0, host="b", reason="killed"), "server-lost server/0 b: killed"),
        (kinds.WorkerJoined(time=1.0, rank=3, host="b"), "worker-joined worker/3 b"),
        (kinds.Restored(time=1.0, checkpoint="d-3@5", step=5), "restored checkpoint=d-3@5 step=5"),
        (
            kinds.Recovering(time=1.0, hosts=["b", "c"], since=1.0, until=601.0),
            "recovering waiting for b, c, 600 s at most",
        ),
        (kinds.Recovered(time=1.0), "recovered"),
        (kinds.Notice(time=1.0, text="slow \x1b[2J"), "notice slow"),
        (kinds.StateChanged(time=1.0, role="worker", rank=1, host="b", state="lost"), "state worker/1 b lost"),
        (kinds.Log(time=1.0, rank="worker/1", stream="stdout", text="x"), "log worker/1 x"),
    ],
)
def test_every_event_has_its_plain_line(event, text):
    assert describe(event) == text


FAILURE = {
    "role": "worker", "rank": 3, "host": "node-b", "status": 1, "time": 1.0, "step": 1204,
    "exception": "ValueError: NaN loss at step 1204",
    "frames": ["train.py:88 in main: step(model)", "train.py:61 in step: assert_finite(loss)"],
    "tail": ["Traceback (most recent call last):"], "code": "", "exit": 1, "hint": "",
    "stopped": ["worker/0", "worker/1", "worker/2", "server/0"], "checkpoint": "digits-3@1200",
    "resume": "psctl train job.yaml --resume latest", "log": "psctl logs digits-3 -r worker:3",
}  # fmt: skip


def ended(status="failed", failure=None, **more):
    return kinds.Finished(
        time=9.0, status=status, exit=1, steps=1204, seconds=192.0, metrics=more.get("metrics", {}), failure=failure
    )


def box(failure, draw=pipe, **more):
    stream, console = draw()
    draw_end(console, "digits-3", ended(failure=failure), **more)
    return [line.rstrip() for line in Text.from_ansi(stream.getvalue()).plain.splitlines()]


def test_the_box_of_a_failed_job_has_rank_host_cause_checkpoint_and_next_commands():
    assert box(FAILURE) == [
        "✗ digits-3 failed at step 1,204 after 3m12s: worker/3 on node-b exited with 1",
        "  ValueError: NaN loss at step 1204",
        "    train.py:88 in main: step(model)",
        "    train.py:61 in step: assert_finite(loss)",
        "  stopped with it: worker/0-2, server/0",
        "  last checkpoint: digits-3@1200 (verified)",
        "  log:             psctl logs digits-3 -r worker:3",
        "  resume:          psctl train job.yaml --resume latest",
    ]


def test_at_a_narrow_terminal_the_box_wraps_below_its_first_word_and_cuts_nothing():
    lines = box(FAILURE, lambda: terminal(50, 20))
    assert set(lines[0].strip()) == set(lines[-1].strip()) == {"─"}
    assert all(len(line) <= 50 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "worker/3 on node-b exited with 1" in text
    assert "psctl train job.yaml --resume latest" in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"status": -9}, "✗ digits-3 failed at step 1,204 after 3m12s: worker/3 on node-b was ended by SIGKILL"),
        ({"frames": [], "tail": ["a", "Segmentation \x1b[31mfault\n"]}, "    │ Segmentation fault"),
        ({"hint": "widen network.ports"}, "  what to do:      widen network.ports"),
        ({"checkpoint": None, "resume": None}, "  last checkpoint: none was written"),
        ({"exception": "ValueError: \x1b]0;evil\x07two\nlines"}, "  ValueError: two lines"),
        ({"stopped": []}, "  log:             psctl logs digits-3 -r worker:3"),
    ],
)
def test_the_box_describes_other_failures_too(changes, line):
    assert line in box(FAILURE | changes)


def test_ranks_that_failed_by_themselves_are_not_called_stopped():
    reasons = ["ValueError: NaN", "ValueError: NaN", "KeyError: \x1b[2J'x'", "A", "B", "C"]
    failed = [{"rank": f"worker/{i}", "exception": reason} for i, reason in enumerate(reasons)]
    lines = box(FAILURE | {"stopped": ["server/0"], "failed": failed})
    assert lines[4:10] == [
        "  failed too:      worker/0-1: ValueError: NaN",
        "  failed too:      worker/2: KeyError: 'x'",
        "  failed too:      worker/3: A",
        "  failed too:      worker/4: B",
        "  failed too:      ... and 1 more",
        "  stopped with it: server/0",
    ]


def test_a_failure_of_which_little_is_known_still_has_its_box():
    assert box({"exception": "the head host was lost"}) == [
        "✗ digits-3 failed at step 1,204 after 3m12s",
        "  the head host was lost",
        "  last checkpoint: none was written",
        "  log:             psctl logs digits-3",
    ]
    assert box(None, checkpoint=WRITTEN)[-1] == "  resume:          psctl checkpoint restore digits-3@1000"


def test_a_done_job_ends_in_one_line_with_its_metrics():
    stream, console = pipe()
    draw_end(console, "digits-3", ended("done", metrics={"loss": 0.021, "accuracy": 0.967}), WRITTEN, "/home/u/logs")
    assert stream.getvalue().splitlines() == [
        "  logs:            psctl logs digits-3   in /home/u/logs",
        "  last checkpoint: digits-3@1000 (12.1 MB) in /ck/digits-3/0000001000",
        "✓ digits-3 done: 1,204 steps in 3m12s, loss 0.021, accuracy 0.967",
    ]


def test_the_summary_comes_before_the_outcome():
    stream, console = pipe()
    draw_end(console, "digits-3", ended("done"), summary=[("throughput", "640 examples/s"), ("survived", "1\x1b[2J")])
    assert stream.getvalue().splitlines() == [
        "  throughput:      640 examples/s",
        "  survived:        1",
        "  logs:            psctl logs digits-3",
        "✓ digits-3 done: 1,204 steps in 3m12s",
    ]


def of_total(event, total):
    return msgspec.structs.replace(event, total=total)


def test_the_bar_shows_the_share_that_is_done_and_the_time_that_is_left():
    run = [of_total(each, 4400) if isinstance(each, kinds.Progress) else each for each in RUN]
    lines = [line.rstrip() for line in drawn(run, 100, 30)]
    assert lines[2].startswith("step        1,100 of 4,400 · epoch 3")
    assert lines[3] == " " * 12 + "█" * 15 + "░" * 45 + "  25%, 33 s left"
    assert max(len(line) for line in drawn(run, 40, 30)) <= 40
    end = [of_total(each, 1100) if isinstance(each, kinds.Progress) else each for each in RUN]
    assert drawn(end, 100, 30)[3].rstrip().endswith("█  100%"), "no time is left"
    assert "/1100 " in describe(of_total(progress(1.0, 7, 2.0), 1100))


def test_a_loss_is_drawn_on_a_log_scale():
    falling = [STARTED, PLANNED, *(progress(110.0 + i, i, 10.0**-i) for i in range(1, 9))]
    curve = next(line for line in drawn(falling, 100, 30) if line.startswith("loss")).split()[2]
    assert curve == "█▇▆▅▄▃▂▁"
    crossing = [STARTED, PLANNED, *(progress(110.0 + i, i, 2.0 - i) for i in range(1, 5))]
    assert any(line.startswith("loss") for line in drawn(crossing, 100, 30)), "a loss below zero has no logarithm"


def test_a_stopped_job_shows_the_command_to_continue():
    stream, console = pipe()
    draw_end(console, "digits-3", ended("stopped"), WRITTEN)
    assert stream.getvalue().splitlines()[-2:] == [
        "  continue:        psctl checkpoint restore digits-3@1000",
        "■ digits-3 stopped: 1,204 steps in 3m12s",
    ]
    stream, console = pipe()
    draw_end(console, "digits-3", ended("stopped"))
    assert "  last checkpoint: none was written" in stream.getvalue()


def test_signals_have_names():
    assert (signal_name(9), signal_name(11), signal_name(64), signal_name(99)) == (
        "SIGKILL", "SIGSEGV", "SIGRTMAX", "signal 99",
    )  # fmt: skip


def test_an_error_is_one_line_and_its_cure_another():
    stream, console = pipe()
    draw_error(console, errors.HostKeyChanged("node-b shows another key", hint="ssh-keygen -R node-b", where="node-b"))
    draw_error(console, errors.InvalidFile("expected\n1..65535", where="cluster.yaml:3:5"))
    assert stream.getvalue().splitlines() == [
        "error: node-b shows another key",
        "  hint: ssh-keygen -R node-b",
        "error: cluster.yaml:3:5: expected 1..65535",
    ]


def test_a_pipe_gets_long_lines_whole_and_no_colour():
    stream, console = pipe()
    say(console, "x" * 500 + " [rank0] [/tmp/x] :smile:", style="bold red")
    assert stream.getvalue() == "x" * 500 + " [rank0] [/tmp/x] :smile:\n"


@pytest.mark.parametrize(
    ("environment", "no_color", "coloured"),
    [
        ({}, False, True),
        ({"NO_COLOR": "1"}, False, False),
        ({"PSCTL_NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, False, True),
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colour_is_for_terminals_that_support_it(environment, no_color, coloured):
    stream = EmulatedTerminal(100, 30)
    console = make_console(stream, no_color=no_color, environment={"TERM": "xterm-256color", **environment})
    say(console, "text", style="red")
    assert ("\x1b[" in stream.getvalue()) is coloured


def test_force_color_does_not_colour_a_pipe(monkeypatch):
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.setenv(name, "1")
    stream = io.StringIO()
    say(make_console(stream), "text", style="red")
    assert stream.getvalue() == "text\n"


def test_an_ascii_terminal_gets_signs_that_it_can_show():
    raw = io.BytesIO()
    console = make_console(io.TextIOWrapper(raw, encoding="ascii"), environment={})
    draw_end(console, "digits-3", ended("done"))
    say(console, *rank_lines("worker/1", "b", "größe", Glyphs(console)))
    console.file.flush()
    assert b"+ digits-3 done" in raw.getvalue()
    assert b"worker/1 b | gr??e" in raw.getvalue() or b"worker/1 b | gr" in raw.getvalue()
