"""Runs the user's script or module as Python itself would, tied to its agent, and writes a report if it fails.

    python .../psctl/process/bootstrap.py SCRIPT ARGS...
    python .../psctl/process/bootstrap.py -m MODULE ARGS...

The script has the same environment as under `python SCRIPT ARGS...`: sys.argv, sys.path[0], `__main__` with its file
(which multiprocessing's spawn needs), exit statuses, its own sys.excepthook, a traceback without psctl's frames. An
exception that ends the script is also written to the error file named in the process's orders, for the agent to report.
Only the standard library is imported before the script runs.

Python's finalization of modules is skipped. When threads are joined, atexit functions have run and streams are flushed,
the process exits at once: during finalization torch's threads sometimes abort a finished script ("terminate called
without an active exception": 2 of 14 plain DDP scripts on a busy machine).
"""

# ruff: noqa: E402  this file's folder is removed from the path before the first import by name

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _HERE:
    del sys.path[0]  # Python added this file's own folder; its modules must not shadow others

import atexit
import builtins
import contextlib
import ctypes
import io
import json
import linecache
import runpy
import threading
import time
import traceback
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Required, TypedDict, TypeVar

from psctl.process import compiler_import, end_signal, lifeline, sealed_memory, stack_dump, torch_import
from psctl.process.secret_masking import Secrets

_PSCTL = os.path.dirname(_HERE) + os.sep

T = TypeVar("T")

MAX_MESSAGE = 1000
"""Characters of an exception's text that are kept, so that a printed tensor does not fill the report."""


def main(argv: list[str]) -> None:
    """Run the script or module in `argv` and end as Python would.

    Args:
        argv: [SCRIPT, ARGS...] or ["-m", MODULE, ARGS...].
    """
    lifeline.arm()
    orders = read_orders()  # also keeps processes that the script starts from inheriting them
    stacks = orders.get("stacks") if orders else None
    if stacks is not None:
        stack_dump.arm(stacks)
    if orders:
        end_signal.arm()
    torch_import.arm()
    compiler_import.arm()  # before the finder of torch_import, which finds the compiler itself
    folder = os.getcwd()
    last = _ExitStatus()
    atexit.register(last.exit)  # registered first, so it runs last
    ended: BaseException | None = None
    try:
        if argv[0] == "-m":
            _run_module(argv[1], argv[1:], folder)
        else:
            _run_script(argv[0], argv)
        last.status = 0
    except SystemExit as end:
        last.status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        if end.code not in (None, 0):
            write_failure(end, end.__traceback__, folder)
            _remember(end)
        if end.code is not None and not isinstance(end.code, int):
            with contextlib.suppress(OSError, ValueError):  # closed, or the pipe has no reader
                print(end.code, file=sys.stderr or sys.__stderr__)
            end.code = 1
        ended = end
    except KeyboardInterrupt as error:
        write_failure(error, error.__traceback__, folder)
        _print(error)
        sys.excepthook = lambda *_: None  # Python then ends itself by SIGINT, as it does for a script
        ended = error
    except BaseException as error:  # noqa: BLE001  any exception of the script is reported and ends the process
        last.status = 1
        write_failure(error, error.__traceback__, folder)
        _print(error)
        ended = SystemExit(1)
    _end()
    if ended is not None:  # an interrupt, or a process that the script forked
        raise ended


class ReportOrders(TypedDict, total=False):
    """Of this process's orders (process_orders.py), those that this module reads without importing msgspec."""

    error_file: Required[str]
    secrets: list[str]
    stacks: int | None


class _ExitStatus:
    """Exits the process as its last atexit function; with `status` None Python exits by itself (by SIGINT)."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._process = os.getpid()

    def exit(self) -> None:
        """Flush all streams and exit with the status."""
        if self.status is None or os.getpid() != self._process:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):  # closed, or the pipe has no reader; as Python does
                    stream.flush()
        ctypes.CDLL(None).fflush(None)  # buffers of C code
        os._exit(self.status)


def _run_script(script: str, argv: list[str]) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    sys.argv = list(argv)
    if os.path.isdir(script) or script.endswith((".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
        return
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path), __cached__=None
    )
    sys.modules["__main__"] = module  # for good: threads and atexit functions run after the script's end
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  the user's script


def _run_module(module: str, argv: list[str], folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    sys.argv = list(argv)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end() -> None:
    """Join threads and run atexit functions, as Python does first when it ends; the last of them exits.

    From 3.12 on Python lets no thread start once it ends by itself, and a run that finishes may need one: to connect
    again, or to limit the time of a close.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # noqa: BLE001  an interrupt of the wait: Python prints it and goes on, too
        traceback.print_exception(error.with_traceback(_beyond_bootstrap(error.__traceback__)))
    atexit._run_exitfuncs()


def _print(error: BaseException) -> None:
    """Print the traceback as Python would: from the script's first frame on, through sys.excepthook."""
    error.__traceback__ = _beyond_bootstrap(error.__traceback__)
    errors = sys.modules.get("psctl.errors")
    if errors and isinstance(error, errors.PsctlError):
        _fold(error)
    _remember(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _fold(error: BaseException) -> None:
    """Remove psctl's own frames from an error's traceback, and a cause without other frames: the text is enough."""
    error.__traceback__ = _outside_psctl(error.__traceback__) or error.__traceback__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        cause.__traceback__ = _outside_psctl(cause.__traceback__)
        error.__cause__ = cause if cause.__traceback__ is not None else None


def _outside_psctl(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without psctl's frames; None when no frame remains."""
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PSCTL):
            kept.append(trace)
        trace = trace.tb_next
    folded: TracebackType | None = None
    for each in reversed(kept):
        folded = TracebackType(folded, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return folded


def _remember(error: BaseException) -> None:
    """Set sys.last_exc and the like, as Python does before atexit functions run."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name == __file__ or name == "<frozen runpy>" or name == runpy.__file__


def _beyond_bootstrap(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    return trace


def frames(trace: TracebackType | None, folder: str) -> list[str]:
    """Return the user's own frames, outermost first, one line each: "train.py:88 in step: loss = f(x)".

    The user's own are in files under `folder`; if there are none, all frames but the bootstrap's are returned.
    """
    own, every = [], []
    trace = _beyond_bootstrap(trace)
    while trace is not None:
        code = trace.tb_frame.f_code
        path = os.path.abspath(code.co_filename)
        inside = path.startswith(folder + os.sep)
        source = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
        where = os.path.relpath(path, folder) if inside else code.co_filename
        line = f"{where}:{trace.tb_lineno} in {code.co_name}" + (f": {source}" if source else "")
        every.append(line)
        if inside:
            own.append(line)
        trace = trace.tb_next
    return own or every


def describe(error: BaseException) -> str:
    """Return the exception as one line: "ValueError: NaN loss"."""
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__", "psctl.errors")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    text = " ".join(str(error).split())
    if len(text) > MAX_MESSAGE:  # both ends: an exception that wraps another's traceback has the cause at its end
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    return f"{name}: {text}" if text else name


def write_failure(error: BaseException, trace: TracebackType | None, folder: str) -> None:
    """Write the exception to the error file named in the orders; does nothing in a process without orders."""
    orders = read_orders()
    if not orders:
        return
    secrets = Secrets(orders.get("secrets", ()))
    report = {
        "time": time.time(),
        "step": _step_reached(),
        "exception": secrets.mask_text(describe(error)),
        "frames": [secrets.mask_text(frame) for frame in frames(trace, folder)],
        "code": _own(error, "code", ""),
        "exit": _own(error, "exit", 1),
        "hint": secrets.mask_text(_own(error, "hint", "")),
    }
    path = orders["error_file"]
    try:
        private = os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(private, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(report, file)
        os.replace(path + ".part", path)
    except OSError as problem:
        print(f"psctl: the report of this failure was not written: {problem}", file=sys.stderr)


def read_orders() -> ReportOrders | None:
    """Return this process's orders; None when psctl did not start it, or when the orders are its parent's."""
    with contextlib.suppress(ProcessLookupError):
        data = sealed_memory.read()
        return json.loads(data) if data else None
    return None


def _own(error: BaseException, name: str, otherwise: T) -> T:
    """Return an attribute of a psctl error, else `otherwise`: a user's exception may have an attribute of that name."""
    errors = sys.modules.get("psctl.errors")
    return getattr(error, name, otherwise) if errors and isinstance(error, errors.PsctlError) else otherwise


def _step_reached() -> int | None:
    """Return the current step of psctl's session; None when the script has none."""
    session = sys.modules.get("psctl.worker.coordinator_session")
    ask = getattr(session, "step_reached", None)
    return ask() if ask else None


if __name__ == "__main__":
    main(sys.argv[1:])
