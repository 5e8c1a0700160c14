"""The states of a job, of a rank, of a job's end and of a restart, as tables; every change of state is made by `move`.

A job is placed (all agents register), started (all workers run) and runs; it begins to end when its workers have ended,
when a user stops it or when a process fails; its final state is one of three.

    submitted -> placing -> starting -> running -> stopping -> done | failed | stopped

A rank (worker or server) is ordered, runs, waits between its `prepare` and the moment when all have their start values,
and ends once: done (status 0), failed (by itself), lost (with its host or its connection), stopped (because the job
ended).

The phases of a job's end, once it is stopping:

    settling    a process failed: a short wait for the report of the first failure, for failures cause each other
    cutting     a graceful stop: all workers run to one common step, save and exit
    draining    no worker is left: servers are still sending the checkpoint
    leaving     servers were ordered to exit
    killing     agents were ordered to end all processes: TERM, then KILL
    closing     no process is left: checkpoints and their copies are being completed
    closed      the last event is written

Every phase but the last has a deadline, so a job that begins to end does end.

The phases of a restart, after a loss that the job may survive:

    settling    a process ended: a short wait for the reports that show whether it was a loss or an exception
    leaving     the number of workers changes: all run to one common step, save and exit
    ending      all workers and servers are being ended: TERM, then KILL
    waiting     no process is left, and the hosts that are left have too few slots: lost hosts may return
    choosing    no process is left: the newest checkpoint with correct digests is being searched
    over        new incarnations of all processes were ordered, or the job ends after all
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
"""Phase of a job's end -> trigger -> next phase. `kill` again in killing: this time without a grace period."""

RECOVERY: Table = {
    "settling": {"end": "ending", "give up": "over"},
    "leaving": {"end": "ending", "give up": "over"},
    "ending": {"gone": "choosing", "short": "waiting", "give up": "over"},
    "waiting": {"gone": "choosing", "give up": "over"},
    "choosing": {"ordered": "over", "short": "waiting", "give up": "over"},
    "over": {},
}
"""Phase of a restart -> trigger -> next phase."""

OVER = frozenset({"done", "failed", "stopped"})
"""Job states that are final."""

ENDED = frozenset({"done", "failed", "lost", "stopped"})
"""Rank states that are final."""


def move(table: Table, state: str, trigger: str) -> str:
    """Return the state that `trigger` leads to; a transition that the table lacks is a bug in psctl."""
    assert trigger in table[state], f"{trigger!r} in state {state!r}: only {sorted(table[state])} are possible"
    return table[state][trigger]
