"""Finds free and taken ports of a host, for `network.ports`. The program is sent like host_state.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def ports(question: Question) -> Question:
    """Return the number of free ports of a range on an address, and the processes that hold the others."""
    host, taken = question["host"], []
    for port in range(question["first"], question["last"] + 1):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe_socket.bind((host, port))
            except OSError:
                taken.append(port)
    held = holders(taken) if taken else {}
    return {
        "free": question["last"] - question["first"] + 1 - len(taken),
        "taken": [
            dict(zip(("port", "pid", "program"), (port, *held.get(port, (0, ""))), strict=True)) for port in taken
        ],
    }


def holders(wanted: list[int]) -> dict[int, tuple[int, str]]:
    """Return the process id and program of each port's holder, if this user may see it; a listener has priority."""
    inodes: dict[str, tuple[int, bool]] = {}  # socket -> its port, whether it listens
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if port in wanted:
                    inodes[f"socket:[{fields[9]}]"] = (port, fields[3] == LISTENING)
    found: dict[int, tuple[bool, int, str]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")) if inodes else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for entry in os.scandir(f"/proc/{pid}/fd"):
                port, listens = inodes.get(os.readlink(entry.path), (0, False))
                if port and (port not in found or listens > found[port][0]):
                    found[port] = (listens, int(pid), program(pid))
    return {port: (pid, name) for port, (_, pid, name) in found.items()}


def program(pid: str) -> str:
    """Return a process's command line, shortened."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read(4096).decode("utf-8", "replace").split("\0")
    words[0] = os.path.basename(words[0])
    text = " ".join(word for word in words if word)
    return text if len(text) <= 60 else text[:57] + "..."


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"ports": ports}[verb](question)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
