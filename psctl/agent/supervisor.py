"""The supervisor: the parent of a job's agent on a host, which ends all remaining processes when the agent has ended.

The agent may be killed at any time. Its children then end by their death signal, but their own children (data loaders)
do not: the supervisor, their subreaper, inherits and ends them. If the supervisor ends first, the agent detects it by a
pipe and does the same work; both call `clean`.
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
from psctl.process.leader_file import read_leader

LIMIT = 10.0
"""Seconds after which a sweep gives up on processes that SIGKILL does not end (they are blocked in the kernel)."""

SPARED = 1.0
"""Seconds for which helpers that clean up shared memory are not killed."""

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
"""Parts of the helpers' command lines; a helper ends by itself at the end of file of its pipe."""

LOG = "agent.log"
"""The file in the job's folder that has the standard error of the supervisor and the agent."""
DEFECT = 70
"""The exit status of an agent that an exception ended (EX_SOFTWARE of sysexits.h)."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files are removed there, none is made
"""Where a data loader that is killed while it passes a tensor on leaves a file that torch names after its process."""

PRIVATE = "private"
PID = "agent.pid"
SLOTS = "slots"


def identity(pid: int) -> str | None:
    """Return "BOOT:TICKS", the id of the boot and the process's start since it; None when it has ended or is a zombie.

    Together with the process id it identifies a process uniquely. Setting a clock changes neither part, as it would
    change a start time since the epoch.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, _, *rest = stat_fields(pid)
    except OSError:
        return None
    return None if state in "ZX" else f"{boot}:{rest[17]}"


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may contain any character."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return all descendants of a process (None: of this one), inherited orphans included.

    psutil's own list omits children that seem older than their parent, as they do after the clock was set.
    """
    children: dict[int, list[int]] = {}
    for each in psutil.pids():
        with contextlib.suppress(OSError):
            children.setdefault(int(stat_fields(each)[1]), []).append(each)
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
    """Kill the chosen descendants of this process, in rounds until none is left, and remove their shared memory.

    Helpers that clean up shared memory are killed after SPARED seconds only.

    Args:
        chosen: returns whether to kill a process; called with descendants only.
        reap: reaps children; the agent passes its own, which records their exit status.
    """
    began = time.monotonic()
    killed: set[int] = set()
    while time.monotonic() - began < LIMIT:
        reap()
        left = [each for each in descendants() if _alive(each) and chosen(each)]
        spared = [each for each in left if time.monotonic() - began < SPARED and _is_helper(each)]
        for each in left:
            if each not in spared:
                with contextlib.suppress(psutil.Error):
                    each.kill()
                    killed.add(each.pid)
        if not left:
            break
        time.sleep(0.01)
    for pid in killed:
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def write_pid(job_dir: Path) -> int:
    """Write the supervisor's process id to a file, and lock that file; return its descriptor, which holds the lock.

    psctl identifies the supervisor by its id and identity, and considers it ended when no process holds the lock. The
    file is created under another name and locked before the rename, so a starting supervisor is never taken for an
    ended one.
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


def last_words(log: Path) -> str:
    """Return the last line of a log, which names the exception after a traceback, and where the log is."""
    try:
        lines = last_lines(log)
    except OSError as error:
        return f"{log}: {error.strerror}"
    return f"{lines[-1].decode(errors='replace')[:500]} ({log})" if lines else f"{log} is empty"


def write_finished(job_dir: Path, job: str, failure: ProcessFailure) -> bool:
    """Append the last event to the event log if it has none; return whether it was written.

    Call it only after the coordinator has ended.
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
        time=failure.time, status="failed", exit=failures.exit_code(failure), steps=steps,
        seconds=max(0.0, failure.time - began),
        metrics=next((e.metrics for e in reversed(found) if isinstance(e, events.Progress)), {}),
        failure=failures.document(failure, job, stopped, checkpoint),
    )  # fmt: skip
    state = events.StateChanged(time=failure.time, role="job", rank=0, host=failure.host, state="failed")
    try:
        with path.open("ab", buffering=0) as file:  # on a full disk: space that the coordinator reserved
            file.write(events.to_line(state) + events.to_line(last))
    except OSError as error:  # psctl reports a job as failed whose agent has ended and whose log has no last event
        print(f"the end of the job was not written: {error.strerror}", file=sys.stderr)
        return False
    return True


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without its newline, which a writer that was killed has not finished."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def clean(job_dir: Path) -> None:
    """Remove the files that only a running agent needs; logs and the event log stay."""
    shutil.rmtree(job_dir / PRIVATE, ignore_errors=True)
    for name in (SOCKET, PID, SLOTS):
        with contextlib.suppress(OSError):
            (job_dir / name).unlink()


def end_job(orders: AgentOrders, status: int) -> None:
    """Write the job's end if it is missing, and remove files, after the agent has ended with `status`."""
    job_dir = Path(orders.job_dir)
    leader = read_leader(job_dir)
    leads = orders.host == (0 if leader is None else leader.host)
    if leads and (leader is None or leader.standby is None):  # else the standby leads from now on
        why = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if status == DEFECT:
            why = f"{why}: {last_words(job_dir / LOG)}"
        text = f"psctl's agent on the head was lost: {why}"
        failure = ProcessFailure("agent/0", orders.job.hosts[0].name, status, time.time(), 0, text)
        write_finished(job_dir, orders.job.name, failure)
    remove_abandoned(Path(orders.workdir) / "checkpoints")  # their writers may have been killed
    clean(job_dir)


def supervise(agent: Callable[[int, int, int], int], end: Callable[[int], None]) -> int:
    """Fork the agent, wait until it ends, end its remaining descendants; return its exit status.

    Args:
        agent: runs the agent in the child. Arguments: the supervisor's process id, a pipe that reaches end of file when
            the supervisor ends, and the lifeline of the agent's children, which does when both have ended.
        end: called after the sweep with the agent's status (minus the number of the signal that killed it).
    """
    lifeline.reap_descendants()
    pid = os.getpid()
    watched, held = os.pipe()
    lifelines = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        lifeline.die_with_parent(pid, signal.SIGTERM)
        status = DEFECT
        try:
            status = agent(pid, watched, lifelines[0])
        except BaseException:  # noqa: BLE001  an error of psctl's: agent.log has it, and the supervisor cleans up
            traceback.print_exc()
        os._exit(status)  # the rest of the program is the supervisor's
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
    """Reap inherited processes until the agent has ended; return its status."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)
