"""A script under bootstrap behaves as under Python, and leaves an account of how it failed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from psctl.process import sealed_memory

SECRET = "correct horse\nbattery staple"
ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "psctl" / "process" / "bootstrap.py"


def run(folder: Path, *argv: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    told = {"error_file": str(folder / "error.json"), "secrets": [SECRET]}
    with sealed_memory.holding(json.dumps(told).encode()) as orders:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PSCTL_ORDERS": f"{folder}/private/worker-0:{orders}"}
        environment.pop("PYTHONSAFEPATH", None)
        command = [sys.executable, *([] if bare else [str(BOOTSTRAP)]), *argv]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, pass_fds=[orders]
        )


def account(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "error.json").read_text())
    return found


SCRIPTS = {
    "prints what it is": (
        "import sys; print(sys.argv, sys.path[0], __name__, __file__, sys.modules['__main__'].__file__)"
    ),
    "raises": "def step(x):\n    raise ValueError(f'bad {x}')\n\nstep(3)\n",
    "raises with a cause": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('enough')",
    "exits with nothing": "import sys; sys.exit()",
    "is no Python": "x = = 1",
    "is interrupted": "raise KeyboardInterrupt",
    "has a hook of its own": (
        "import sys\nsys.excepthook = lambda t, v, b: print('hook', t.__name__, b.tb_lineno)\n1/0\n"
    ),
    "has a thread that outlives it": (
        "import threading\nfirst = threading.Event()\n"
        "threading.Thread(target=lambda: (first.wait(0.2), print('late'))).start()\n"
    ),
    "prints through C": "import ctypes; ctypes.CDLL(None).printf(b'from C\\n')",
    "forks": (  # from 3.12 on Python warns of a fork in a process that has threads, and psctl's has
        "import os, sys, warnings\nwarnings.filterwarnings('ignore', 'This process')\nchild = os.fork()\n"
        "if child == 0:\n    sys.exit(5)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 1)\n"
    ),
    "has a fork that ends with a text": (
        "import os, sys, warnings\nwarnings.filterwarnings('ignore', 'This process')\nchild = os.fork()\n"
        "if child == 0:\n    sys.exit('no data')\nprint(os.waitpid(child, 0)[1])\n"
    ),
    "leaves a pool at work": (
        "import atexit, time\nfrom concurrent.futures import ThreadPoolExecutor\natexit.register(print, 'end')\n"
        "ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print('late')))\n"
    ),
    "works at its end": (
        "import atexit, sys\natexit.register(lambda: print(type(getattr(sys, 'last_value', None))))\n1/0\n"
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_under_python(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    ours, pythons = run(tmp_path, "train.py", "--lr", "0.1"), run(tmp_path, "train.py", "--lr", "0.1", bare=True)
    assert (ours.returncode, ours.stdout) == (pythons.returncode, pythons.stdout)
    if "file" not in SCRIPTS[name]:
        assert ours.stderr.replace(str(tmp_path) + "/", "") == pythons.stderr.replace(str(tmp_path) + "/", "")


def test_an_interrupt_while_threads_end_is_printed_and_the_rest_still_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import atexit, os, signal, threading, time\natexit.register(print, 'end')\n\ndef late():\n"
        "    time.sleep(0.3)\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.3)\n\n"
        "threading.Thread(target=late).start()\n"
    )
    ours, pythons = run(tmp_path, "train.py"), run(tmp_path, "train.py", bare=True)
    assert (ours.returncode, ours.stdout) == (pythons.returncode, pythons.stdout) == (0, "end\n")
    assert "KeyboardInterrupt" in ours.stderr and "bootstrap" not in ours.stderr


def test_a_script_that_closed_its_errors_ends_with_its_status(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.stderr.close()\nsys.exit('no data')\n")
    assert run(tmp_path, "train.py").returncode == run(tmp_path, "train.py", bare=True).returncode == 1


@pytest.mark.parametrize("ends", ["", "import sys; sys.exit(3)", "1/0", "raise KeyboardInterrupt"])
def test_threads_can_be_started_when_the_script_has_ended(tmp_path: Path, ends: str) -> None:
    """A run that finishes needs some, and Python 3.12 by itself refuses them then."""
    (tmp_path / "train.py").write_text(
        "import atexit, threading\n\ndef late():\n    thread = threading.Thread(target=print, args=('late',))\n"
        f"    thread.start()\n    thread.join()\n\natexit.register(late)\n{ends}\n"
    )
    assert run(tmp_path, "train.py").stdout == "late\n"


def test_a_module_does_what_it_does_under_python(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "train.py").write_text("import sys; print(sys.argv, sys.path[0], __spec__.name, __package__)")
    assert run(tmp_path, "-m", "pkg.train", "a").stdout == run(tmp_path, "-m", "pkg.train", "a", bare=True).stdout


OURS = """
import psctl.units
code = '''
def add(work):
    try:
        work()
    except ZeroDivisionError as error:
        from psctl.errors import PeerLost
        raise PeerLost("worker/1 is gone") from error
'''
exec(compile(code, psctl.units.__file__, "exec"))  # as if it stood there

def lost():
    add(PART)

lost()
"""


def test_an_error_of_psctl_is_printed_with_the_users_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OURS.replace("PART", "lambda: 1 / 0"))
    said = run(tmp_path, "train.py").stderr
    assert "units.py" not in said
    assert [line.strip() for line in said.splitlines() if "File" in line][-2:] == [
        f'File "{tmp_path}/train.py", line 16, in <module>',
        f'File "{tmp_path}/train.py", line 14, in lost',
    ]
    assert "ZeroDivisionError" in said  # the user's code has a part in the cause
    assert said.splitlines()[-1] == "psctl.errors.PeerLost: worker/1 is gone"
    (tmp_path / "train.py").write_text(OURS.replace("PART", "lambda: 1 / 0").replace("work()", "1 / 0"))
    alone = run(tmp_path, "train.py").stderr
    assert "ZeroDivisionError" not in alone
    assert alone.splitlines()[0] == "Traceback (most recent call last):"


def test_an_exception_is_accounted_for_with_the_users_own_frames(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json\nfrom helper import load\n\ndef main():\n    load('{')\n\nmain()\n")
    (tmp_path / "helper.py").write_text("import json\ndef load(text):\n    return json.loads(text)\n")
    assert run(tmp_path, "train.py").returncode == 1
    found = account(tmp_path)
    assert found["frames"] == [
        "train.py:7 in <module>: main()",
        "train.py:5 in main: load('{')",
        "helper.py:3 in load: return json.loads(text)",
    ]
    assert str(found["exception"]).startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert (found["code"], found["exit"], found["step"]) == ("", 1, None)


def test_psctls_own_error_brings_its_code_and_cure(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from psctl.errors import PortTaken\nraise PortTaken('no port', 'widen ports:')\n"
    )
    assert run(tmp_path, "train.py").returncode == 1
    found = account(tmp_path)
    assert (found["exception"], found["code"], found["exit"]) == ("PortTaken: no port", "port-taken", 7)
    assert found["hint"] == "widen ports:"


def test_a_nonzero_exit_is_accounted_for_and_a_good_end_is_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    run(tmp_path, "train.py", "0")
    assert not (tmp_path / "error.json").exists()
    run(tmp_path, "train.py", "4")
    assert account(tmp_path)["exception"] == "SystemExit: 4"


def test_processes_that_the_script_spawns_find_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n\ndef double(x):\n    return 2 * x\n\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [1, 2]))\n"
    )
    done = run(tmp_path, "train.py")
    assert (done.stdout, done.stderr) == ("[2, 4]\n", "")


def test_nothing_but_the_standard_library_is_imported_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys; print([n for n in ('msgspec', 'torch', 'psctl.errors') if n in sys.modules])"
    )
    assert run(tmp_path, "train.py").stdout == "[]\n"


CHILD = """
import os, sys, time
if os.fork():
    from psctl.process import lifeline
    lifeline.arm()
    assert "PSCTL_LIFELINE" not in os.environ
    print("armed", flush=True)
time.sleep(60)
"""


def test_the_end_of_the_lifeline_ends_a_process_and_its_children() -> None:
    reader, writer = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PSCTL_LIFELINE": f"{reader}:{os.getpid()}"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        pass_fds=[reader],
        start_new_session=True,
        stdout=subprocess.PIPE,
        env=environment,
    ) as child:
        os.close(reader)
        assert child.stdout is not None
        assert child.stdout.readline() == b"armed\n"
        os.close(writer)
        assert child.stdout.read() == b""  # the fork held the pipe too: both are gone
        assert child.wait(10) == -signal.SIGKILL


def test_an_interrupt_of_the_scripts_own_is_accounted_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def step():\n    raise KeyboardInterrupt\n\nstep()\n")
    assert run(tmp_path, "train.py").returncode == -2
    found = account(tmp_path)
    assert found["exception"] == "KeyboardInterrupt"
    assert found["frames"] == ["train.py:4 in <module>: step()", "train.py:2 in step: raise KeyboardInterrupt"]


def test_a_long_message_is_kept_at_both_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('in a loader: ' + 'x' * 5000 + ' KeyError: 7')")
    run(tmp_path, "train.py")
    found = str(account(tmp_path)["exception"])
    assert found.startswith("ValueError: in a loader: xxx")
    assert found.endswith("xxx KeyError: 7")
    assert len(found) < 1100


def test_the_account_of_a_failure_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"import json\nkey = {SECRET!r}\nraise ValueError(f'refused: {{json.dumps(key)}} {{key}}', 'battery staple')\n"
    )
    assert run(tmp_path, "train.py").returncode == 1
    written = (tmp_path / "error.json").read_text()
    assert "refused: " in written
    assert "horse" not in written
    assert "battery" not in written


def test_what_a_script_starts_does_not_inherit_its_orders(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import psctl\npsctl.init()\n")
    (tmp_path / "train.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, 'inner.py'], close_fds=False).returncode)\n"
    )
    ended = run(tmp_path, "train.py")
    assert ended.returncode == 1
    assert "UsageError: psctl.init() was called in a process that a worker started" in ended.stderr
