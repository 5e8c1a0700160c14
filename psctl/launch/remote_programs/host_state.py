"""Reports the state of a host and of its jobs, with the standard library only.

The source of this program is sent as the argument of `python -c`, so that it runs on a host without psctl. Its first
argument is a verb, the second the verb's parameters as JSON; the answer is one JSON document on standard output.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from psctl.launch.remote_programs.pending_orders import discard_orders, orders_for, sweep_unread

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

FOLDERS = ("code", "envs", "wheels", "jobs", "checkpoints", "data")
"""Folders of a workdir that other users must not be able to write, like the workdir itself."""

ASKED = 5.0
"""Seconds that the system's service of logins has for an answer."""

# ---- state of the host -------------------------------------------------------------------------------------------


def probe(question: Question) -> Question:
    """Return versions, free space, psctl's files here, and the jobs that run."""
    workdir = os.path.expanduser(question["workdir"])
    sweep_unread(workdir)
    codes = {name: os.path.isdir(os.path.join(workdir, "code", name)) for name in question["codes"]}
    return {
        "executable": sys.executable,
        "version": ".".join(map(str, sys.version_info[:3])),
        "paths": [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))],
        "modules": {name: version_of(name) for name in question["modules"]},
        "cuda": torch_cuda(),
        "workdir": workdir,
        "free": free_space(workdir),
        "inodes": free_inodes(workdir),
        "writable": writable(workdir),
        "open": open_to_others(workdir, FOLDERS),
        "clock": time.time(),
        "codes": codes,
        "environments": environments(workdir),
        "ready": read_json(os.path.join(workdir, "ready.json")),
        "jobs": jobs(workdir),
        "names": sorted({*names(workdir, "jobs"), *names(workdir, "checkpoints")}),
        "machine": machine_id(),
        "system": sys.platform,
        "logout_kills": logout_kills(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }


def machine_id(root: str = "/") -> str:
    """Return a hash of the id of a machine's installation and of the hardware addresses of its network cards.

    It survives reboots, and changes when the machine is installed anew or replaced.

    Args:
        root: the root of its file system.
    """
    found = []
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError), open(os.path.join(root, path), encoding="ascii", errors="replace") as file:
            found.append(file.read().strip())
            break
    # cards only: bridges and tunnels get new addresses at each boot
    for device in sorted(glob.glob(os.path.join(root, "sys/class/net/*/device"))):
        folder = os.path.dirname(device)
        # a card in a bond shows the bond's address
        for path in ("bonding_slave/perm_hwaddr", "address"):
            with contextlib.suppress(OSError), open(os.path.join(folder, path), encoding="ascii") as file:
                found.append(file.read().strip())
                break
    return hashlib.sha256("\n".join(["psctl", *found]).encode()).hexdigest()[:16]


def logout_kills(cgroup: str = "/proc/self/cgroup") -> bool:
    """Return whether systemd-logind ends what this login session started when it ends (KillUserProcesses).

    Args:
        cgroup: the file that names the control group of this process.
    """
    try:
        with open(cgroup, encoding="utf-8", errors="replace") as file:
            if not re.search(r"/session-[^/]*\.scope", file.read()):
                return False
        names = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
        command = ["loginctl", "show-session", *(f"--property={name}" for name in names)]  # no session: the manager's
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASKED, check=False
        )
        user = pwd.getpwuid(os.geteuid()).pw_name
    except (OSError, subprocess.TimeoutExpired, KeyError):
        return False
    found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    only, excluded = (found.get(name, "").split() for name in names[1:])
    return found.get(names[0]) == "yes" and user not in excluded and (not only or user in only)


def free_space(path: str) -> int:
    """Return the free bytes of the file system where `path` is or would be."""
    found = os.statvfs(existing(path))
    return found.f_bavail * found.f_frsize


def free_inodes(path: str) -> int | None:
    """Return the free inodes of the file system where `path` is or would be; None if it has no limit."""
    found = os.statvfs(existing(path))
    return found.f_favail if found.f_files else None


def writable(path: str) -> bool:
    """Return whether `path` can be written or created."""
    return os.access(existing(path), os.W_OK | os.X_OK)


def existing(path: str) -> str:
    """Return `path` if it exists, else its nearest existing parent."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def version_of(module: str) -> str | None:
    """Return the version of a module of this Python without importing it; None if it is not installed."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(module)
    except (importlib.metadata.PackageNotFoundError, ImportError, ValueError):
        return None


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, read from its files; None without torch or for a CPU build."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "version.py")
    try:
        with open(path, encoding="utf-8") as file:
            match = re.search(r"^cuda[^=\n]*= *'([^']+)'", file.read(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def open_to_others(path: str, parts: Iterable[str] = ()) -> dict[str, str] | None:
    """Return why another user can change files below `path`, and the remedy; None if no other user can.

    The folder and its `parts` must belong to this user and be writable by this user alone. A parent folder that others
    may write is safe only with the sticky bit (/tmp), because otherwise they can replace the folder. For a missing
    folder only its parents are checked.
    """
    whole, real = os.path.abspath(path), os.path.realpath(path)
    ours = [whole, real, *(os.path.join(real, part) for part in parts)]
    above = [folder for each in (whole, real) for folder in folders_above(each)]
    for folder in dict.fromkeys([*above, *ours]):
        try:
            link, found = os.lstat(folder), os.stat(folder)
        except FileNotFoundError:
            continue
        foreign = {owner for owner in (link.st_uid, found.st_uid) if owner not in (os.geteuid(), 0)}
        if foreign and (folder in ours or stat.S_ISLNK(link.st_mode)):
            why = f"{folder} belongs to another user (uid {foreign.pop()})"
            return {"why": why, "cure": f"chown {os.geteuid()} {folder}"}
        if found.st_mode & 0o022 and (folder in ours or not found.st_mode & stat.S_ISVTX):
            why = f"others may write {folder} (mode {found.st_mode & 0o7777:o})"
            return {"why": why, "cure": f"chmod go-w {folder}"}
    return None


def folders_above(path: str) -> list[str]:
    """Return all parent folders of an absolute path, the root first."""
    return [str(folder) for folder in reversed(pathlib.PurePosixPath(path).parents)]


def environments(workdir: str) -> dict[str, object]:
    """Return the complete virtual environments by key, each with the content of the file that was written last."""
    found = {}
    for path in glob.glob(os.path.join(workdir, "envs", "*", "psctl-ready.json")):
        found[os.path.basename(os.path.dirname(path))] = read_json(path)
    return found


def names(workdir: str, folder: str) -> list[str]:
    """Return the names in a folder of the workdir."""
    try:
        return [entry.name for entry in os.scandir(os.path.join(workdir, folder)) if entry.is_dir()]
    except OSError:
        return []


def read_json(path: str) -> object:
    """Return a JSON file's value; None when it is missing or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


# ---- jobs --------------------------------------------------------------------------------------------------------


def jobs(workdir: str) -> list[Question]:
    """Return the jobs whose agent runs here, and how many workers each has on this host."""
    found = []
    for path in glob.glob(os.path.join(workdir, "jobs", "*", "*", "agent.pid")):
        folder = os.path.dirname(path)
        if agent_of(folder) is None:
            continue
        workers = read_json(os.path.join(folder, "slots")) or 0
        found.append({"job": os.path.basename(os.path.dirname(folder)), "folder": folder, "workers": workers})
    return found


def identity(pid: int) -> str | None:
    """Return "BOOT:TICKS" of a process: the id of the boot, and its start in ticks since then; None if it has ended."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def agent_of(folder: str) -> tuple[int, str] | None:
    """Return the process id and identity of the agent in agent.pid, if that process still runs."""
    path = os.path.join(folder, "agent.pid")
    try:
        with open(path, encoding="utf-8") as file:
            pid, named = file.read().split()
            found = identity(int(pid))
            if (
                ":" not in named
            ):  # written by psctl before 0.1.0: a time of day, which a change of the clock invalidates
                same = b"PSCTL_ORDERS=" + os.fsencode(os.path.join(folder, "orders.json")) in environment_of(pid)
            else:
                same = named == found and is_locked(file.fileno())
    except (OSError, ValueError):
        return None
    return (int(pid), found) if found is not None and same else None


def is_locked(descriptor: int) -> bool:
    """Return whether a process holds the lock of a file; also True on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False  # closing the descriptor releases our lock


def environment_of(pid: int | str) -> list[bytes]:
    """Return the environment that a process was started with.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")


def marks_of(pid: str) -> list[bytes]:
    """Return a process's arguments, and its environment if that can be read; [] if it has ended."""
    found: list[bytes] = []
    for part in ("cmdline", "environ"):
        try:
            with open(f"/proc/{pid}/{part}", "rb") as file:
                found += file.read().split(b"\0")
        except OSError:
            continue
    return found


def processes(folder: str) -> dict[int, str]:
    """Return the pid and identity of every process of the job in `folder`: the agent, and those with orders there."""
    mark = f"PSCTL_ORDERS={folder.rstrip('/')}/".encode()
    found = {}
    agent = agent_of(folder)
    if agent is not None:
        found[agent[0]] = agent[1]
    for entry in glob.glob("/proc/[0-9]*"):
        ours = any(item.startswith(mark) for item in marks_of(entry[6:]))
        started = identity(int(entry[6:]))
        if ours and started is not None and int(entry[6:]) != os.getpid():
            found[int(entry[6:])] = started
    return found


def sweep(question: Question) -> Question:
    """Return the processes of a job that still run after `seconds`; with `kill`, kill exactly those.

    With `kill`, and when none runs any more, remove what a killed supervisor has left, such as secrets and keys.
    """
    folder, deadline = question["folder"], time.monotonic() + question.get("seconds", 0)
    while True:
        left = processes(folder)
        if question.get("kill"):
            kill_all(left)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if question.get("kill") and not left:
        clean(folder)
    sweep_unread(workdir_of(folder))
    return {"left": [{"pid": pid, "command": command_of(pid)} for pid in left]}


def kill_all(found: dict[int, str]) -> None:
    """Kill processes, given by pid and identity.

    All are stopped before the first is killed: one that saw another end would report a failure in the event log.
    """
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid, started in found.items():
            if identity(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # has just ended; is reported as left
                    os.kill(pid, number)
    signal.pthread_sigmask(signal.SIG_SETMASK, allowed)


def clean(folder: str) -> None:
    """Remove the files that only a running agent needs, as its supervisor does; keep the logs and the event log."""
    discard_orders(folder)
    shutil.rmtree(os.path.join(folder, "private"), ignore_errors=True)
    for name in ("agent.sock", "agent.pid", "slots"):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


def command_of(pid: int) -> str:
    """Return a process's command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def digest(question: Question) -> Question:
    """Return, for each job folder, whether its agent runs, and the last state of the job and of every rank."""
    for workdir in {workdir_of(each["folder"]) for each in question["jobs"]}:
        sweep_unread(workdir)
    return {each["folder"]: digest_one(each["folder"], each["pid"], each["started"]) for each in question["jobs"]}


def workdir_of(folder: str) -> str:
    """Return the workdir of a folder WORKDIR/jobs/JOB/HOST."""
    return os.path.dirname(os.path.dirname(os.path.dirname(folder)))


def digest_one(folder: str, pid: int, started: str) -> Question:
    """Return the digest of one event log; of lines that workers printed it has the last one.

    The agent is found by its process id and identity; if psctl ended before it recorded those, by its folder.
    """
    alive = identity(pid) == started if started else bool(processes(folder))
    waiting = bool(orders_for(folder))
    out: Question = {"alive": alive, "waiting": waiting, "ranks": {}, "traffic": {}}
    printed = b""
    leader = read_json(os.path.join(folder, "leader.json"))
    if isinstance(leader, dict):
        out["leader"] = leader
    try:
        file = open(os.path.join(folder, "events.jsonl"), "rb")  # noqa: SIM115 - closed below
    except OSError:
        return out
    with file:
        for line in file:
            if line[:200].find(b'"event":"log"') >= 0 or not line.endswith(b"\n"):
                if b'"rank":"worker/' in line[:200] and b'"stream":"stdout"' in line[:200] and line.endswith(b"\n"):
                    printed = line
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue
            note(out, event)
    with contextlib.suppress(ValueError):
        out["printed"] = json.loads(printed)
    written = out.get("checkpoint")
    if written and not os.path.isfile(os.path.join(written["path"], "manifest.json")):
        del out["checkpoint"]  # it has been pruned
    return out


def note(out: Question, event: Question) -> None:
    """Add one event to a digest."""
    kind = event.get("event")
    if kind in ("started", "plan", "progress", "checkpoint", "finished"):
        out[kind] = event
    elif kind == "restored":  # later steps are repeated
        out.pop("progress", None)
        out["ranks"] = {name: {**rank, "step": min(rank["step"], event["step"])} for name, rank in out["ranks"].items()}
    elif kind == "traffic":
        out["traffic"][event["host"]] = event
    elif kind == "recovering":
        out["recovering"] = event
    elif kind == "recovered":
        out.pop("recovering", None)
    elif kind == "state" and event.get("role") == "job":
        out["state"] = event["state"]
        out.pop("recovering", None)
    elif kind == "state":
        out["ranks"][f"{event['role']}/{event['rank']}"] = event


# ---- logs --------------------------------------------------------------------------------------------------------


def logs(question: Question) -> Iterator[bytes]:
    """Yield the last lines of the named logs, each as JSON [name, line], oldest first within a log.

    If the first lines of a log have been removed, [name, number of removed lines] precedes them.
    """
    pattern = re.compile(question["grep"].encode()) if question.get("grep") else None
    tail = question.get("tail")
    for name, parts in sorted(segments(os.path.join(question["folder"], "logs")).items()):
        if not any(name.startswith(prefix) for prefix in question["prefixes"]):
            continue
        if parts[0][0]:
            yield json.dumps([name, parts[0][0]]).encode() + b"\n"
        every = (line for _, path in parts for line in lines_of(path))
        lines = (line for line in every if pattern is None or pattern.search(line))
        for line in lines if tail is None else collections.deque(lines, tail):
            yield json.dumps([name, line.decode(errors="replace").rstrip("\r\n")]).encode() + b"\n"


def segments(folder: str) -> dict[str, list[tuple[int, str]]]:
    """Return the segments of each log (see agent/log_files.py): the number of the first line, and the path."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in glob.glob(os.path.join(folder, "*.log")):
        match = re.fullmatch(r"(\w+-\d+\.std(?:out|err))(?:\.(\d+))?\.log", os.path.basename(path))
        if match:
            found.setdefault(match[1] + ".log", []).append((int(match[2] or 0), path))
    return {name: sorted(parts) for name, parts in found.items()}


def lines_of(path: str) -> Iterator[bytes]:
    """Yield the lines of a file; nothing if it has been removed meanwhile."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError:
        return
    with file:
        yield from file


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    if verb == "logs":
        for line in logs(question):
            sys.stdout.buffer.write(line)
        return 0
    print(json.dumps({"probe": probe, "sweep": sweep, "digest": digest}[verb](question)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
