"""The agent's ear for psctl: a Unix socket in the job's folder that only this user can open."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from psctl.agent.control_client import SOCKET

LONGEST = 1 << 16
"""Bytes of a request."""


class ControlRequest(msgspec.Struct, frozen=True):
    """One command."""

    command: str
    arguments: dict[str, Any] = {}


class ControlRefused(Exception):
    """The command is unknown or wrong; the caller's fault."""


class ControlSocket:
    """Answers requests on a thread of its own, one at a time.

    Args:
        job_dir: where the socket is made.
        private: a 0700 folder on the same disk; the socket is born there, so nobody else can open it in between.
        answer: called with each request; raises Refused.
    """

    def __init__(self, job_dir: Path, private: Path, answer: Callable[[ControlRequest], dict[str, Any]]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                (private / SOCKET).unlink()
            self._socket.bind(f"/proc/self/fd/{folder}/{SOCKET}")  # the path itself may be too long for an address
        finally:
            os.close(folder)
        (private / SOCKET).chmod(0o600)
        (private / SOCKET).rename(job_dir / SOCKET)
        self._socket.listen(16)
        threading.Thread(target=self._listen, name="psctl ear", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # descriptors are short for a moment, or the process ends
                threading.Event().wait(0.05)
                continue
            with caller, contextlib.suppress(OSError):  # a caller that goes away harms nobody
                if _user_of(caller) != os.getuid():
                    continue
                caller.settimeout(5.0)
                with caller.makefile("rb") as file:
                    caller.sendall(msgspec.json.encode(self._reply(file.readline(LONGEST))) + b"\n")

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            return self._answer(msgspec.json.decode(line, type=ControlRequest))
        except (ControlRefused, msgspec.DecodeError) as error:
            return {"error": {"code": "refused", "message": str(error)}}


def _user_of(caller: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel knows it."""
    _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
