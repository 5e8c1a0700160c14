"""What each press of Ctrl-C and each SIGTERM does while a job is followed."""

from __future__ import annotations

import pytest

from psctl.cli.shared.interrupts import InterruptPolicy


@pytest.mark.parametrize(
    ("terminal", "on_interrupt", "presses", "acts", "exit_code"),
    [
        (True, None, [("interrupt", 0.0), ("time", 1.0), ("time", 3.0)], ["announce", None, "leave"], None),
        (True, None, [("interrupt", 0.0), ("interrupt", 2.0), ("interrupt", 9.0)], ["announce", "save", "kill"], 130),
        (True, "stop", [("interrupt", 0.0), ("interrupt", 1.0)], ["stop", "kill"], 130),
        (False, None, [("interrupt", 0.0), ("interrupt", 1.0)], ["stop", "kill"], 130),
        (False, "detach", [("interrupt", 0.0)], ["leave"], None),
        (True, None, [("terminate", 0.0)], ["stop"], 143),
        (False, None, [("terminate", 0.0), ("terminate", 1.0)], ["stop", "kill"], 143),
        (True, None, [("interrupt", 0.0), ("terminate", 1.0)], ["announce", "stop"], 143),
        (True, None, [("time", 0.0), ("time", 9.0)], [None, None], None),
        (False, None, [("interrupt", 0.0), ("time", 60.0)], ["stop", None], 130),
    ],
)
def test_every_press_climbs_the_ladder(
    terminal: bool,
    on_interrupt: str | None,
    presses: list[tuple[str, float]],
    acts: list[str | None],
    exit_code: int | None,
) -> None:
    policy = InterruptPolicy(terminal, on_interrupt)
    assert [policy.next_action(press, now) for press, now in presses] == acts  # type: ignore[arg-type]
    if exit_code is None:
        assert policy.by == ""
    else:
        assert policy.exit == exit_code
