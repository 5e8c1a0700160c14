"""Runs the user's script or module as Python itself would, tied to its agent, and leaves an account of how it failed.

    python .../psctl/process/bootstrap.py SCRIPT ARGS...
    python .../psctl/process/bootstrap.py -m MODULE ARGS...

What the script sees is what it sees under `python SCRIPT ARGS...`: sys.argv, sys.path[0], `__main__` with its file (so
that multiprocessing's spawn finds it), exit statuses, its own sys.excepthook, a traceback without psctl's frames. An
exception that ends it is also written to the error file that the process's orders name, for the agent to report.
Nothing but the standard library is imported before the script runs.

One thing is left out at the end. When threads are joined, atexit functions have run and all is flushed, the process
leaves at once; Python would now take its modules down, and torch's threads abort a finished script then now and then
("terminate called without an active exception": 2 of 14 plain DDP scripts on a busy machine).
"""

# ruff: noqa: E402  this file's folder leaves the path before anything is imported by name

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _HERE:
    del sys.path[0]  # Python put this file's own folder there; its modules must not shadow anybody's

import atexit
import builtins
import contextlib
import ctypes
import io
import json
import linecache
import runpy
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from psctl.process import lifeline, sealed_memory, stack_dump
from psctl.process.secret_masking import Secrets

_PSCTL = os.path.dirname(_HERE) + os.sep

MAX_MESSAGE = 1000
"""Characters of an exception's text that are kept: enough to read, not a tensor's whole print."""


def main(argv: list[str]) -> None:
    """Run what `argv` names and end as Python would.

    Args:
        argv: [SCRIPT, ARGS...] or ["-m", MODULE, ARGS...].
    """
    lifeline.arm()
    orders = told()  # from here on what the script starts does not inherit them
    if orders and orders.get("stacks") is not None:
        stack_dump.arm(orders["stacks"])
    folder = os.getcwd()
    last = _Last()
    atexit.register(last.leave)  # registered before all others, so it runs after them
    try:
        if argv[0] == "-m":
            _run_module(argv[1], argv[1:], folder)
        else:
            _run_script(argv[0], argv)
        last.status = 0
    except SystemExit as end:
        last.status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        if end.code not in (None, 0):
            account(end, end.__traceback__, folder)
            _remember(end)
        raise
    except KeyboardInterrupt as error:
        account(error, error.__traceback__, folder)
        _print(error)
        sys.excepthook = lambda *_: None  # Python then ends itself by SIGINT, as it does for a script
        raise
    except BaseException as error:  # noqa: BLE001  whatever the script raises is written down and ends it
        last.status = 1
        _fail(error, folder)


class _Last:
    """The last thing that the process does. `status` None leaves the end to Python (it ends itself by SIGINT)."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._process = os.getpid()

    def leave(self) -> None:
        """End the process with its status, everything flushed."""
        if self.status is None or os.getpid() != self._process:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads: Python says no more than that
                    stream.flush()
        ctypes.CDLL(None).fflush(None)  # what C code printed through its own buffers
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
    sys.modules["__main__"] = module  # and it stays there: threads and atexit functions outlive the script's last line
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  the user's script


def _run_module(module: str, argv: list[str], folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    sys.argv = list(argv)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fail(error: BaseException, folder: str) -> NoReturn:
    account(error, error.__traceback__, folder)
    _print(error)
    raise SystemExit(1)


def _print(error: BaseException) -> None:
    """Print the traceback as Python would: from the script's first frame on, through the script's own hook."""
    error.__traceback__ = _beyond_bootstrap(error.__traceback__)
    errors = sys.modules.get("psctl.errors")
    if errors and isinstance(error, errors.PsctlError):
        _fold(error)
    _remember(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _fold(error: BaseException) -> None:
    """Leave psctl's own frames out of a traceback, and a cause that has no others: such an error says what is wrong."""
    error.__traceback__ = _outside_psctl(error.__traceback__) or error.__traceback__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        cause.__traceback__ = _outside_psctl(cause.__traceback__)
        error.__cause__ = cause if cause.__traceback__ is not None else None


def _outside_psctl(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without psctl's frames; None when there are no others."""
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
    """Say to atexit functions, as Python does, that an exception ends the process."""
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

    The user's own are those of files under `folder`; where there are none, all but psctl's bootstrap.
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
    if len(text) > MAX_MESSAGE:  # both ends: an exception that wraps another's traceback says at its end what happened
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    return f"{name}: {text}" if text else name


def account(error: BaseException, trace: TracebackType | None, folder: str) -> None:
    """Write how the process fails to the error file of its orders; without orders there is nobody to tell."""
    orders = told()
    if not orders:
        return
    secrets = Secrets(orders.get("secrets", ()))
    account = {
        "time": time.time(),
        "step": _step_reached(),
        "exception": secrets.strike_text(describe(error)),
        "frames": [secrets.strike_text(frame) for frame in frames(trace, folder)],
        "code": _own(error, "code", ""),
        "exit": _own(error, "exit", 1),
        "hint": secrets.strike_text(_own(error, "hint", "")),
    }
    path = orders["error_file"]
    try:
        private = os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(private, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(account, file)
        os.replace(path + ".part", path)
    except OSError as problem:
        print(f"psctl: the account of this failure was not written: {problem}", file=sys.stderr)


def told() -> dict[str, Any] | None:
    """Return this process's orders; None when it has none, or those of the process that started it."""
    with contextlib.suppress(ProcessLookupError):
        data = sealed_memory.read()
        return json.loads(data) if data else None
    return None


def _own(error: BaseException, name: str, otherwise: Any) -> Any:
    """Return what a psctl error says of itself; a user's exception may have an attribute of that name too."""
    errors = sys.modules.get("psctl.errors")
    return getattr(error, name, otherwise) if errors and isinstance(error, errors.PsctlError) else otherwise


def _step_reached() -> int | None:
    """Ask psctl's session, where the script has one, which step it is in."""
    session = sys.modules.get("psctl.worker.coordinator_session")
    ask = getattr(session, "step_reached", None)
    return ask() if ask else None


if __name__ == "__main__":
    main(sys.argv[1:])
