"""Shells on the nodes of a Slurm allocation: every command is a step of it, started by srun."""

from __future__ import annotations

import shutil
import subprocess
import time

from psctl.errors import AllocationEnded
from psctl.remote.command import CommandShell
from psctl.spec.exec_template import ExecTemplate

STEP = (
    "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--mpi=none",
)  # fmt: skip
"""Options of a step: it shares processors, memory and GPUs with the other steps, and uses all of the node's."""

ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "RESIZING")
"""States of an allocation that has not ended."""

LOST_ALLOCATION = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE")
"""States of an allocation that Slurm ended, and no person."""

_SETTLE = 90.0
"""Seconds in which Slurm ends the last processes of an allocation; until then its state does not say why it ended."""

_CURE = "run psctl in a new allocation (salloc, sbatch); `psctl train --resume JOB@latest` continues a job there"

_ASK = 30.0
"""Seconds that squeue may take."""


def connect(name: str, node: str, allocation: str, patience: float | None = None) -> CommandShell:
    """Run a first command on a node.

    Args:
        name: the host's name.
        node: the node's name in Slurm.
        allocation: number of the allocation.
        patience: seconds in which a step must begin; None: the same as over SSH.

    Raises:
        AllocationEnded: it has.
        HostUnreachable: srun is missing, or no step begins.
    """
    words = ("srun", f"--jobid={allocation}", "--nodelist={host}", *STEP, "{command}")

    def explain() -> AllocationEnded | None:
        why = why_ended(allocation)
        return AllocationEnded(f"{name}: {why}", _CURE, where=name) if why else None

    return CommandShell.connect(name, node, ExecTemplate(words), patience, steps=True, explain=explain)


def why_ended(allocation: str) -> str:
    """Return a clause that says how an allocation ended; "" where it has not, or nothing is known."""
    state = state_of(allocation) if allocation else None
    if state is None or state in ALIVE:
        return ""
    return f"the Slurm allocation {allocation} has ended ({state}), and psctl's processes with it"


def settled_state(allocation: str) -> str | None:
    """Return the state of an allocation as `state_of`, once Slurm has ended its processes where it is ending them."""
    until = time.monotonic() + _SETTLE
    while (state := state_of(allocation)) == "COMPLETING" and time.monotonic() < until:
        time.sleep(1.0)
    return state


def state_of(allocation: str) -> str | None:
    """Return the state of an allocation: "RUNNING", ..., or "unknown to Slurm"; None where squeue cannot say."""
    if shutil.which("squeue") is None:
        return None
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={allocation}", "--states=all", "--format=%T"], check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_ASK,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout.strip() or "unknown to Slurm"
    return "unknown to Slurm" if "Invalid job id" in done.stderr else None
