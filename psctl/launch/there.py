"""What psctl asks of a host about itself and its jobs, as one program of Python's own library.

Its source is sent along (over standard input, or as the argument of `python -c`), so that a bare host can be asked too.
The first argument is a verb, the second its question as JSON; the answer is one JSON document on standard output.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

Question = dict[str, Any]

CLOCK_STEP = 2.0
"""Seconds by which the start time of a process may seem to move, for it is told relative to a clock that is set."""

# ---- what the host is like ---------------------------------------------------------------------------------------


def probe(question: Question) -> Question:
    """Return versions, free space, what psctl has put here, and which jobs run."""
    workdir = os.path.expanduser(question["workdir"])
    codes = {name: os.path.isdir(os.path.join(workdir, "code", name)) for name in question["codes"]}
    return {
        "executable": os.path.realpath(sys.executable) if question.get("resolve") else sys.executable,
        "version": ".".join(map(str, sys.version_info[:3])),
        "paths": [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))],
        "modules": {name: version_of(name) for name in question["modules"]},
        "cuda": torch_cuda(),
        "workdir": workdir,
        "home": os.path.expanduser("~"),
        "free": free_space(workdir),
        "writable": writable(workdir),
        "clock": time.time(),
        "codes": codes,
        "environments": environments(workdir),
        "ready": read_json(os.path.join(workdir, "ready.json")),
        "jobs": jobs(workdir),
        "names": sorted({*names(workdir, "jobs"), *names(workdir, "checkpoints")}),
        "hostname": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }


def version_of(module: str) -> str | None:
    """Return the version of a module that would import here, without importing it."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(module)
    except (importlib.metadata.PackageNotFoundError, ImportError, ValueError):
        return None


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, read from its files; None for a CPU build or no torch."""
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


def free_space(path: str) -> int:
    """Return the bytes left on the disk where `path` is or would be."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def writable(path: str) -> bool:
    """Tell whether `path` can be written or made."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def environments(workdir: str) -> dict[str, Any]:
    """Return the finished virtual environments by key, each with the note that was written last."""
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


def read_json(path: str) -> Any:
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
        orders = read_json(os.path.join(folder, "orders.json")) or {}
        workers = read_json(os.path.join(folder, "slots"))  # there when they became others than those of the start
        if not isinstance(workers, int):
            try:
                workers = orders["job"]["hosts"][orders["host"]]["workers"]
            except (KeyError, IndexError, TypeError):
                workers = 0
        found.append({"job": os.path.basename(os.path.dirname(folder)), "folder": folder, "workers": workers})
    return found


def start_time(pid: int) -> str | None:
    """Return the kernel's start time of a process (clock ticks since boot); None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def agent_of(folder: str) -> tuple[int, str] | None:
    """Return the agent's process that agent.pid names, when it is that very process and alive."""
    try:
        with open(os.path.join(folder, "agent.pid"), encoding="utf-8") as file:
            pid_text, created = file.read().split()
    except (OSError, ValueError):
        return None
    pid = int(pid_text)
    started = start_time(pid)
    if started is None or abs(boot_time() + int(started) / os.sysconf("SC_CLK_TCK") - float(created)) > CLOCK_STEP:
        return None
    return pid, started


def boot_time() -> float:
    """Return when the machine was booted, seconds since the epoch."""
    with open("/proc/stat", encoding="utf-8") as file:
        return float(next(line for line in file if line.startswith("btime")).split()[1])


def processes(folder: str) -> dict[int, str]:
    """Return pid and start time of every process of the job in `folder`: the agent, and all whose orders lie there."""
    mark = f"PSCTL_ORDERS={folder.rstrip('/')}/".encode()
    found = {}
    agent = agent_of(folder)
    if agent is not None:
        found[agent[0]] = agent[1]
    for entry in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{entry}/environ", "rb") as file:
                ours = any(item.startswith(mark) for item in file.read().split(b"\0"))
        except OSError:
            continue
        started = start_time(int(entry[6:]))
        if ours and started is not None and int(entry[6:]) != os.getpid():
            found[int(entry[6:])] = started
    return found


def sweep(question: Question) -> Question:
    """Return what still runs of a job after `seconds`; with `kill` it is killed, and only what is the job's own.

    What a killed keeper could not remove any more, secrets and keys among it, is removed then.
    """
    folder, deadline = question["folder"], time.monotonic() + question.get("seconds", 0)
    while True:
        left = processes(folder)
        if question.get("kill"):
            for pid, started in left.items():
                if start_time(pid) == started:
                    os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if question.get("kill") and not left:
        clean(folder)
    return {"left": [{"pid": pid, "command": command_of(pid)} for pid in left]}


def clean(folder: str) -> None:
    """Remove from a job's folder what only a running agent needs, as its keeper does; logs and the event log stay."""
    shutil.rmtree(os.path.join(folder, "private"), ignore_errors=True)
    for name in ("agent.sock", "agent.pid", "slots", "orders.json", "events.jsonl.kept"):
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
    """Return, for each job folder, whether its agent lives and the last state of the job and of every rank."""
    return {each["folder"]: digest_one(each["folder"], each["pid"], each["started"]) for each in question["jobs"]}


def digest_one(folder: str, pid: int, started: str) -> Question:
    """Read one event log; lines that a process printed are passed over unread.

    The agent is known by its process id and start time ("BOOT:TICKS", the ticks count).
    """
    alive = bool(started) and start_time(pid) == started.rpartition(":")[2]
    out: Question = {"alive": alive, "known": os.path.isdir(folder), "ranks": {}}
    try:
        file = open(os.path.join(folder, "events.jsonl"), "rb")  # noqa: SIM115 - closed below
    except OSError:
        return out
    with file:
        for line in file:
            if line[:200].find(b'"event":"log"') >= 0 or not line.endswith(b"\n"):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue
            note(out, event)
    return out


def note(out: Question, event: Question) -> None:
    """Take one event into a digest."""
    kind = event.get("event")
    if kind in ("started", "plan", "progress", "checkpoint", "finished"):
        out[kind] = event
    elif kind == "state" and event.get("role") == "job":
        out["state"] = event["state"]
    elif kind == "state":
        out["ranks"][f"{event['role']}/{event['rank']}"] = event


# ---- logs --------------------------------------------------------------------------------------------------------


def logs(question: Question) -> Iterator[bytes]:
    """Yield the last lines of the named log files, each as JSON [name, line], oldest first within a file."""
    pattern = re.compile(question["grep"].encode()) if question.get("grep") else None
    tail = question.get("tail")
    for path in sorted(glob.glob(os.path.join(question["folder"], "logs", "*.log"))):
        name = os.path.basename(path)
        if not any(name.startswith(prefix) for prefix in question["prefixes"]):
            continue
        with open(path, "rb") as file:
            lines = (line for line in file if pattern is None or pattern.search(line))
            kept = last(lines, tail) if tail is not None else lines
            for line in kept:
                yield json.dumps([name, line.decode(errors="replace").rstrip("\r\n")]).encode() + b"\n"


def last(lines: Iterator[bytes], count: int) -> list[bytes]:
    """Return the last `count` lines."""
    kept: list[bytes] = []
    for line in lines:
        kept.append(line)
        if len(kept) > 2 * count + 16:
            del kept[: len(kept) - count]
    return kept[len(kept) - count :] if count else []


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
