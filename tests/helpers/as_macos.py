"""Runs psctl as on macOS: without what Python has on Linux only; its modules find no /proc, /sys or /dev/shm.

    python tests/helpers/as_macos.py ARGUMENTS...

Libraries are imported before, because those installed here are built for Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import re
import resource
import runpy
import select
import signal
import socket
import sys
import time
from types import FrameType, ModuleType
from typing import Any

import cryptography.hazmat.primitives.ciphers.aead
import msgspec
import numpy as np
import paramiko
import psutil
import rich
import typer
import yaml

LIBRARIES = [cryptography, msgspec, np, paramiko, psutil, rich, typer, yaml]
LINUX_ONLY: dict[ModuleType, str] = {
    os: """memfd_create pidfd_open sched_[gs]et.* posix_fa.* eventfd.* getrandom setns unshare splice copy_file_range
        waitid [gs]etres[ug]id fdatasync pipe2 .*xattr (MFD|EFD|CLONE|SPLICE|POSIX_FADV|RWF|XATTR|GRND)_.* P_PIDFD
        O_(TMPFILE|PATH|DIRECT|LARGEFILE|NOATIME)""",
    socket: """SO_(PEERCRED|BINDTODEVICE|MARK|DOMAIN|PROTOCOL|PRIORITY|PEERSEC|PASSCRED|INCOMING_CPU)
        SOCK_(CLOEXEC|NONBLOCK) AF_(NETLINK|VSOCK|PACKET|CAN|TIPC|ALG) MSG_(MORE|CMSG_CLOEXEC|ERRQUEUE)
        TCP_(CONGESTION|USER_TIMEOUT|INFO|QUICKACK|CORK|DEFER_ACCEPT|KEEPIDLE|SYNCNT|WINDOW_CLAMP|LINGER2)""",
    select: "epoll EPOLL.*",
    signal: "sigtimedwait sigwaitinfo SIG(RTMIN|RTMAX|PWR|STKFLT|POLL|CLD) pidfd_send_signal",
    time: "CLOCK_(BOOTTIME|TAI) pthread_getcpuclockid",
    fcntl: "F_(ADD_SEALS|GET_SEALS|SEAL_.*|SETPIPE_SZ|GETPIPE_SZ|NOTIFY|SETLEASE|GETLEASE)",
    mmap: "MAP_(POPULATE|DENYWRITE|EXECUTABLE|STACK) MADV_(HUGEPAGE|NOHUGEPAGE|DONTFORK|DOFORK|REMOVE|HWPOISON)",
    resource: "prlimit RLIMIT_(RTPRIO|RTTIME|SIGPENDING|MSGQUEUE|NICE|OFILE) RUSAGE_THREAD",
}
"""Names that Python's documentation gives for Linux, not for macOS."""
ABSENT = ("/proc", "/sys", "/dev/shm")


class NoLibrary:
    """The C library of another system: none of Linux's calls."""

    def __init__(self, name: str | None, *_: Any, **__: Any) -> None:
        if name is not None:
            raise OSError(f"dlopen({name}): no such file")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"dlsym: {name}: symbol not found")


def asks_psctl(frame: FrameType | None) -> bool:
    """Return whether a module of psctl made the call, and psutil, which does without /proc there, did not."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/psutil/" in name:
            return False
        if "/psctl/" in name:
            return True
        frame = frame.f_back
    return False


def refuse_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse psctl's access to files that macOS does not have; an audit hook."""
    if event in ("open", "os.listdir", "os.scandir") and arguments and isinstance(arguments[0], str | bytes):
        path = os.fsdecode(arguments[0])
        if path.startswith(ABSENT) and asks_psctl(sys._getframe(1)):
            raise FileNotFoundError(2, "No such file or directory", path)


def main() -> None:
    for module, patterns in LINUX_ONLY.items():
        for name in [name for name in dir(module) if any(re.fullmatch(each, name) for each in patterns.split())]:
            delattr(module, name)
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    ctypes.CDLL = NoLibrary  # type: ignore[assignment, misc]
    sys.addaudithook(refuse_files)
    sys.argv[0] = "psctl"
    runpy.run_module("psctl", run_name="__main__")


if __name__ == "__main__":
    main()
