"""The states of a job, of a rank and of a job's end, as tables; everything that moves a state goes through `move`.

A job is placed (all agents register), started (all workers run) and runs; it begins to end when its workers have ended,
when someone stops it or when something fails; it is over in one of three ways.

    submitted -> placing -> starting -> running -> stopping -> done | failed | stopped

A rank (worker or server) is ordered, runs, waits between its `prepare` and the moment when all have their start values,
and ends once: done (status 0), failed (of itself), lost (with its host or its connection), stopped (because the job
ended).

How a job ends, once it is stopping:

    settling    something failed: a moment to hear who failed first, for deaths cause each other
    cutting     a polite stop: all workers go to one common step, save and leave
    draining    no worker is left: what they saved is still being sent by servers
    leaving     servers were asked to leave
    killing     agents were told to end everything: TERM, then KILL
    closing     no process is left: checkpoints and their copies are being finished
    closed      the last event is written

Every phase but the last has a deadline, so a job that began to end ends.

How a job starts again, after a loss that it may survive:

    settling    something died: a moment to hear whether it was a loss or somebody's exception
    leaving     another number of workers is wanted: all go to one common step, save and leave
    ending      all workers and servers are being ended: TERM, then KILL
    choosing    no process is left: the newest checkpoint whose every byte is right is being found
    over        new incarnations of all were ordered, or the job ends after all
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, Mapping[str, str]]

JOB: Table = {
    "submitted": {"placed": "placing", "ending": "stopping"},
    "placing": {"registered": "starting", "ending": "stopping"},
    "starting": {"started": "running", "again": "starting", "ending": "stopping"},
    "running": {"again": "starting", "ending": "stopping"},
    "stopping": {"done": "done", "failed": "failed", "stopped": "stopped"},
    "done": {},
    "failed": {},
    "stopped": {},
}
"""Job state -> trigger -> next state. `again`: all processes are started anew."""

_ENDS = {"ended": "done", "failed": "failed", "lost": "lost", "stopped": "stopped"}

RANK: Table = {
    "starting": {"started": "running", **_ENDS},
    "running": {"prepared": "waiting", **_ENDS},
    "waiting": {"go": "running", **_ENDS},
    "done": {},
    "failed": {},
    "lost": {},
    "stopped": {},
}
"""Rank state -> trigger -> next state."""

ENDING: Table = {
    "settling": {"kill": "killing"},
    "cutting": {"workers gone": "draining", "kill": "killing"},
    "draining": {"saved": "leaving", "kill": "killing"},
    "leaving": {"kill": "killing", "gone": "closing"},
    "killing": {"kill": "killing", "gone": "closing"},
    "closing": {"finished": "closed"},
    "closed": {},
}
"""Phase of a job's end -> trigger -> next phase. `kill` again in killing: this time without grace."""

RECOVERY: Table = {
    "settling": {"end": "ending", "give up": "over"},
    "leaving": {"end": "ending", "give up": "over"},
    "ending": {"gone": "choosing", "give up": "over"},
    "choosing": {"ordered": "over", "give up": "over"},
    "over": {},
}
"""Phase of a restart -> trigger -> next phase."""

OVER = frozenset({"done", "failed", "stopped"})
"""Job states that are final."""

ENDED = frozenset({"done", "failed", "lost", "stopped"})
"""Rank states that are final."""


def move(table: Table, state: str, trigger: str) -> str:
    """Return the state that `trigger` leads to; a move that the table does not have is our own mistake."""
    assert trigger in table[state], f"{trigger!r} in state {state!r}: only {sorted(table[state])} are possible"
    return table[state][trigger]
