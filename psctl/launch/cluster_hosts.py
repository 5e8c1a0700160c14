"""The hosts of a cluster whose file does not list them: those that a command prints, and the nodes of Slurm."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence

import msgspec

from psctl import errors
from psctl.clock import Clock, SystemClock
from psctl.remote import slurm
from psctl.remote.local import LocalShell
from psctl.spec.cluster import ClusterSpec
from psctl.spec.hosts import read_found
from psctl.spec.yaml_nodes import LARGEST

LISTING = 60.0
"""Seconds that a command which lists hosts, or one of Slurm, may take."""

POLL = 3.0
"""Seconds between two looks at an allocation that waits."""

_KEEPER = """\
#!/bin/sh
# Holds an allocation for psctl: until no step was in it for a minute, and for ten minutes before the first one.
idle=0 limit=600
while [ "$idle" -lt "$limit" ]; do
  sleep 10
  steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i) || continue
  if printf '%s\\n' "$steps" | grep -q '[.][0-9]'; then idle=0 limit=60; else idle=$((idle + 10)); fi
done
"""


class Allocation(msgspec.Struct, frozen=True):
    """An allocation of Slurm: its number and its nodes.

    `owned`: psctl submitted it, and cancels it. `racks`: the switch of each node, where Slurm knows the network.
    """

    number: str
    nodes: list[str]
    owned: bool = False
    racks: dict[str, str] = {}


def found_hosts(command: str, source: str) -> list[str]:
    """Run the command of `hosts: {from: COMMAND}` on this machine and return the hosts that it prints.

    Args:
        command: split into words, no shell.
        source: the cluster file, for messages.

    Raises:
        HostUnreachable: it cannot be started, fails, or takes longer than LISTING.
        InvalidFile: it prints no hosts, or something else.
    """
    printed = output_of(shlex.split(command), f"{source}: hosts.from: `{command}`", source)
    try:
        return read_found(printed, command)
    except errors.InvalidFile as error:
        error.where = source
        raise


def allocated_nodes(environment: Mapping[str, str], source: str) -> Allocation:
    """Return the Slurm allocation that psctl runs in.

    Args:
        environment: Slurm's variables.
        source: the cluster file, for messages.

    Raises:
        NoSuchCluster: psctl runs in none.
        HostUnreachable: scontrol cannot be asked.
    """
    allocation = environment.get("SLURM_JOB_ID", "")
    if not allocation.isdecimal():
        raise errors.NoSuchCluster(
            f"{source}: kind: slurm uses the allocation that psctl runs in, and psctl runs in none (no SLURM_JOB_ID)",
            "`psctl train` and `checkpoint restore` submit one; or salloc --nodes=2 psctl ...",
            where=source,
        )
    nodes = _names_of(environment.get("SLURM_JOB_NODELIST", ""), source)
    return Allocation(allocation, nodes, racks=_racks_of(nodes, source))


def _names_of(nodes: str, source: str) -> list[str]:
    command = ["scontrol", "show", "hostnames", nodes]
    shown = shlex.join(command)
    return read_found(output_of(command, f"{source}: `{shown}`", source), shown)


def _racks_of(nodes: Sequence[str], source: str) -> dict[str, str]:
    """Return the lowest switch of each node, from topology.conf; {} where Slurm has none."""
    shown = output_of(["scontrol", "show", "topology"], f"{source}: `scontrol show topology`", source)
    found: dict[str, str] = {}
    for line in shown.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        if words.get("Level") == "0" and words.get("SwitchName") and words.get("Nodes"):
            below = _names_of(words["Nodes"], source)
            found |= {node: words["SwitchName"] for node in nodes if node in below}
        if len(found) == len(nodes):
            break
    return found


def output_of(command: Sequence[str], what: str, source: str, stdin: bytes = b"") -> str:
    """Run a command on this machine and return its output; `what` names it in errors.

    Raises:
        HostUnreachable: it cannot be started, fails, or takes longer than LISTING.
    """
    here = LocalShell("this machine")
    try:
        done = here.run(
            [os.path.expanduser(command[0]), *command[1:]], stdin=stdin, timeout=LISTING, check=False, limit=LARGEST
        )
    except errors.TimedOut as error:
        why = f"{what} did not end within {LISTING:g} s"
        raise errors.HostUnreachable(why, "run it in a terminal: does it ask something?", source) from error
    finally:
        here.close()
    if done.status != 0:
        said = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it printed no error"])[-1]
        why = f"{what} ended with exit status {done.status}: {said}"
        raise errors.HostUnreachable(why, "run it in a terminal, then correct it or its login", source)
    return done.stdout.decode("utf-8", "replace")


def submit(
    spec: ClusterSpec, source: str, progress: Callable[[str, str], None], clock: Clock | None = None,
    patience: float | None = None,
) -> Allocation:  # fmt: skip
    """Submit an allocation as the cluster file describes it, and wait until Slurm has granted it.

    Args:
        spec: the cluster.
        source: its file, for messages.
        progress: shows the state in the queue when it changes.
        clock: for the wait; the system's by default.
        patience: seconds that it may wait in the queue; None: any time.

    Raises:
        HostUnreachable: Slurm refuses it.
        AllocationEnded: it was cancelled while it waited, or waited too long.
    """
    clock = clock or SystemClock()
    printed = output_of(_sbatch(spec), f"{source}: sbatch", source, stdin=_KEEPER.encode())
    number = printed.strip().partition(";")[0]
    if not number.isdecimal():
        raise errors.HostUnreachable(f"{source}: sbatch printed {printed[:60]!a}, not a number", where=source)
    try:
        limit = None if patience is None else clock.now() + patience
        nodes = _names_of(_await_nodes(number, source, progress, clock, limit), source)
        return Allocation(number, nodes, owned=True, racks=_racks_of(nodes, source))
    except BaseException:
        release(number)
        raise


def _sbatch(spec: ClusterSpec) -> list[str]:
    command = ["sbatch", "--parsable", f"--job-name=psctl-{spec.name}", f"--nodes={spec.nodes}", "--output=/dev/null"]
    if spec.partition is not None:
        command.append(f"--partition={spec.partition}")
    if spec.account is not None:
        command.append(f"--account={spec.account}")
    if spec.gpus_per_node is not None:
        command.append(f"--gpus-per-node={spec.gpus_per_node}")
    if spec.time is not None:
        command.append(f"--time={math.ceil(spec.time / 60)}")
    return [*command, "--no-requeue", "--no-kill", *spec.extra]


def _await_nodes(
    number: str, source: str, progress: Callable[[str, str], None], clock: Clock, limit: float | None
) -> str:
    """Wait until an allocation runs; return its nodes as Slurm writes them."""
    command, shown = ["squeue", "--noheader", f"--jobs={number}", "--states=all", "--format=%T|%r|%N"], ""
    while True:
        line = output_of(command, f"{source}: squeue", source).strip()
        state, _, rest = line.partition("|")
        reason, _, nodes = rest.rpartition("|")
        if state == "RUNNING" and nodes:
            progress("", f"Slurm granted allocation {number}: {nodes}")
            return nodes
        if state not in slurm.ALIVE:
            raise errors.AllocationEnded(
                f"{source}: the Slurm allocation {number} ended before it began ({state or 'unknown to Slurm'})",
                "psctl train submits another one",
                where=source,
            )
        now = f"Slurm allocation {number} waits: {state}{f' ({reason})' if reason not in ('', 'None') else ''}"
        if now != shown:
            progress("", now)
            shown = now
        if limit is not None and clock.now() >= limit:
            raise errors.AllocationEnded(
                f"{source}: the Slurm allocation {number} still waits ({state}), longer than restart.wait allows",
                "psctl train ... --resume auto continues the job; restart: {wait: 12h} waits longer",
                where=source,
            )
        clock.sleep(POLL)


def release(number: str) -> None:
    """Cancel an allocation; one that has ended, or a Slurm that does not answer, is no error."""
    here = LocalShell("this machine")
    try:
        here.run(["scancel", number], timeout=LISTING, check=False)
    except errors.TimedOut:
        return  # its script ends it when no step is left
    finally:
        here.close()
