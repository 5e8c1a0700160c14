"""The parent of a job's agent on a host: it waits, and when the agent is gone it leaves nothing behind.

The agent may be killed at any moment. Its children then die by their death signal, but *their* children (data loaders)
do not: they fall to the keeper, which is their subreaper, and it ends them. The other way round, the agent notices the
keeper's end by a pipe and does the same work itself; that is why `clean` lives here and both call it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from psctl.agent.control_client import SOCKET
from psctl.checkpoint.writer import remove_abandoned
from psctl.job import events, failures
from psctl.job.process_messages import ProcessFailure
from psctl.orders import AgentOrders
from psctl.process import lifeline

LIMIT = 10.0
"""Seconds after which a sweep gives up on processes that even SIGKILL does not end (they hang in the kernel)."""

SPARED = 1.0
"""Seconds that helpers which clean up shared memory get to do so once those they work for are gone."""

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
"""Parts of their command lines; they leave by themselves when nobody is left at the other end of their pipes."""

PRIVATE = "private"
PID = "agent.pid"
SLOTS = "slots"


def identity(pid: int) -> str | None:
    """Return "BOOT:TICKS", which with the process id names a process for good: the boot, and the start since that boot.

    None when it is gone or a zombie. No clock that is set moves either part; a start time since the epoch moves.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, _, *rest = _stat(pid)
    except OSError:
        return None
    return None if state in "ZX" else f"{boot}:{rest[17]}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return all processes below one (None: below this one), orphans that fell to it included.

    psutil's own list leaves out children that seem older than their parent, as they do when the clock is set meanwhile.
    """
    children: dict[int, list[int]] = {}
    for each in psutil.pids():
        with contextlib.suppress(OSError):
            children.setdefault(int(_stat(each)[1]), []).append(each)
    found, parents = [], [pid or os.getpid()]
    while parents:
        below = [child for parent in parents for child in children.pop(parent, [])]
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(each))
        parents = below
    return found


def _is_helper(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(helper in line for helper in HELPERS)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def sweep(chosen: Callable[[psutil.Process], bool] = lambda process: True, *, reap: Callable[[], None] = _reap) -> None:
    """End those of our descendants that are chosen, in rounds until none is left.

    Helpers that tidy up shared memory are spared for a second.

    Args:
        chosen: which of them; only ever asked about our own descendants.
        reap: takes the ends of children in; the agent passes its own, for it wants to know them.
    """
    began = time.monotonic()
    while time.monotonic() - began < LIMIT:
        reap()
        left = [each for each in descendants() if _alive(each) and chosen(each)]
        spared = [each for each in left if time.monotonic() - began < SPARED and _is_helper(each)]
        for each in left:
            if each not in spared:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        if not left:
            return
        time.sleep(0.01)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def write_pid(job_dir: Path) -> int:
    """Write which process keeps the job on this host, and lock that file; return its descriptor, which holds the lock.

    psctl knows the process again by its id and identity, and takes it for gone when nobody holds the lock. The file
    appears with the lock held, so nobody can take a process that begins for one that has ended.
    """
    begun = job_dir / (PID + ".new")
    descriptor = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a disk without locks: the identity alone decides
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, f"{os.getpid()} {identity(os.getpid())}\n".encode())
    begun.rename(job_dir / PID)
    return descriptor


def last_lines(path: Path, size: int = 1 << 20) -> list[bytes]:
    """Return the whole lines at a file's end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return [line for line in file.read().split(b"\n")[:-1] if line]


def write_finished(job_dir: Path, job: str, failure: ProcessFailure, exit_code: int = 1) -> bool:
    """Give the event log its last event if it has none: the job's coordinator can not do so any more.

    Call it only when the coordinator is gone. Returns whether it was written.
    """
    path = job_dir / events.FILE
    lines = last_lines(path) if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(events.from_line(line))
    if any(isinstance(event, events.Finished) for event in found):
        return False
    _cut_torn_line(path)
    saved = [event.step for event in found if isinstance(event, events.CheckpointWritten)]
    steps = max([event.step for event in found if isinstance(event, events.Progress | events.StateChanged)], default=0)
    ranks = {f"{e.role}/{e.rank}": e.state for e in found if isinstance(e, events.StateChanged) and e.role != "job"}
    stopped = [name for name, state in ranks.items() if state in ("starting", "running", "waiting")]
    checkpoint = f"{job}@{saved[-1]}" if saved else None
    began = next((event.time for event in found), failure.time)
    last = events.Finished(
        time=failure.time, status="failed", exit=exit_code, steps=steps, seconds=max(0.0, failure.time - began),
        metrics=next((e.metrics for e in reversed(found) if isinstance(e, events.Progress)), {}),
        failure=failures.document(failure, job, stopped, checkpoint),
    )  # fmt: skip
    state = events.StateChanged(time=failure.time, role="job", rank=0, host=failure.host, state="failed")
    try:
        with path.open("ab", buffering=0) as file:  # if the disk is full, into the room that the coordinator reserved
            file.write(events.to_line(state) + events.to_line(last))
    except OSError as error:  # psctl says itself that a job failed whose agent is gone and whose log has no end
        print(f"the end of the job was not written: {error.strerror}", file=sys.stderr)
        return False
    return True


def _cut_torn_line(path: Path) -> None:
    """A writer that was killed in the middle of a line leaves a torn one, which nobody can read."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def clean(job_dir: Path) -> None:
    """Remove what only a running agent needs; logs and the event log stay."""
    shutil.rmtree(job_dir / PRIVATE, ignore_errors=True)
    for name in (SOCKET, PID, SLOTS):
        with contextlib.suppress(OSError):
            (job_dir / name).unlink()


def end_job(orders: AgentOrders, status: int) -> None:
    """Give the job an end on this host after the agent has ended with `status`, in order or not."""
    job_dir = Path(orders.job_dir)
    if orders.host == 0:
        why = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        text = f"psctl's agent on the head died: {why}"
        failure = ProcessFailure("agent/0", orders.job.hosts[0].name, status, time.time(), 0, text, [], [])
        write_finished(job_dir, orders.job.name, failure)
    remove_abandoned(Path(orders.workdir) / "checkpoints")  # who wrote them may have been killed
    clean(job_dir)


def keep(agent: Callable[[int, int, int], int], end: Callable[[int], None]) -> int:
    """Fork the agent, wait for its end, sweep; return its exit status.

    Args:
        agent: the agent's life in the child; given the keeper's process id, a pipe that ends with the keeper, and the
            lifeline that children of the agent hold (it ends with both of us).
        end: called after the sweep with the agent's status (minus the signal's number when one killed it).
    """
    lifeline.reap_descendants()
    keeper = os.getpid()
    watched, held = os.pipe()
    lifelines = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        lifeline.die_with_parent(keeper, signal.SIGTERM)
        status = 70
        try:
            status = agent(keeper, watched, lifelines[0])
        except BaseException:  # noqa: BLE001  a mistake of ours: told in agent.log, and the keeper cleans up
            traceback.print_exc()
        os._exit(status)  # the keeper's part of the program is not ours
    os.close(watched)
    os.close(lifelines[0])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: _forward(child, signal.SIGTERM))
    status = _wait(child)
    sweep()
    end(status)
    return status


def _forward(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _wait(child: int) -> int:
    """Reap everything that falls to us until the agent itself has ended."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)
