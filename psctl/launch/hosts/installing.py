"""Installs packages into an environment on a host: the runs of pip, and how they get requirements with passwords.

What psctl itself needs comes in the versions that it is tested with, and pip checks their hashes. torch comes in the
version that was asked for; where that is the tested one, so does what it brings. The user's requirements
are installed last, unpinned, and may replace the others within the ranges that psctl works with. A wheelhouse is
installed as it is: its content was chosen on the operator's machine, and the host verifies its hash.

Requirements and the index go over standard input, for either may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.launch import pins
from psctl.launch.hosts.site import NEEDED
from psctl.remote.shell import Shell
from psctl.units import hide_credentials

INSTALL_TIMEOUT = 3600.0
"""Seconds for pip: torch with CUDA is gigabytes."""

_PIP = (
    'umask 077; IFS= read -r index; if [ -n "$index" ]; then PIP_INDEX_URL=$index; export PIP_INDEX_URL; fi; '
    'exec "$@" -r /dev/stdin'
)
"""Arguments: pip... Input: the index or an empty line, then requirements. `read` takes no more than its line."""

_OTHERS = "DO NOT MATCH THE HASHES"


class PipRun(msgspec.Struct, frozen=True):
    """One run of pip."""

    lines: tuple[str, ...]
    options: tuple[str, ...] = ()


def runs_of(packages: Sequence[str], pinned: Mapping[str, str], constraints: str) -> list[PipRun]:
    """Return the runs of pip that install packages.

    Args:
        packages: what is wanted; those of `pinned` stand there as NAME==VERSION.
        pinned: a line with hashes by name; empty: all is taken as it is found.
        constraints: path of the file of tested versions on the host.
    """
    own = [name for name, line in pinned.items() if f"{name}=={pins.version_of(line)}" in packages]
    if not own:
        return [PipRun(tuple(packages))]
    brought = [each for name in own for each in pins.BRINGS.get(name, ())]
    runs = [PipRun(tuple(pinned[name] for name in [*own, *brought]), ("--require-hashes",))]
    exact = {f"{name}=={pins.version_of(pinned[name])}" for name in own}
    engine = tuple(each for each in packages if re.match(r"torch\b(?!-)", each))
    theirs = tuple(each for each in packages if each not in exact and each not in engine)
    if engine:
        tested = [each.partition("+")[0] for each in engine] == [f"torch=={pins.torch()}"]
        runs.append(PipRun(engine, ("-c", constraints) if tested else ()))
    if theirs:
        runs.append(PipRun((*theirs, *engine, *(f"{name}>={NEEDED[name]}" for name in own))))
    return runs


def install(
    shell: Shell, pip: Sequence[str], options: Sequence[str], runs: Sequence[PipRun], index: str | None
) -> None:
    """Install packages on a host.

    Args:
        shell: the host.
        pip: how pip is run there.
        options: for every run.
        runs: see `runs_of`.
        index: where pip looks, None where it is set to.

    Raises:
        DiskFull, PythonMissing: it cannot be done there.
    """
    for run in runs:
        command = [*pip, "install", "--disable-pip-version-check", "--no-input", "--quiet", *options, *run.options]
        text = "".join(f"{line}\n" for line in (index or "", *run.lines))
        try:
            shell.run(["sh", "-c", _PIP, "sh", *command], stdin=text.encode(), timeout=INSTALL_TIMEOUT)
        except errors.CommandFailed as error:
            tail = hide_credentials(error.tail)
            clean = errors.CommandFailed(error.host, hide_credentials(error.command), error.status, tail)
            raise _failed(shell.name, clean) from clean


def _failed(host: str, error: errors.CommandFailed) -> errors.PsctlError:
    if "No space left" in error.tail:
        return errors.DiskFull(f"{host}: no space left for packages", hint="set runtime.workdir to another disk")
    if _OTHERS in error.tail:
        found = re.search(r"^\s+([A-Za-z0-9._-]+==\S+) from (\S+)", error.tail, re.MULTILINE)
        what = f"{found[1]} from {found[2].partition('#')[0]}" if found else "a package"
        return errors.PythonMissing(
            f"{host}: {what} is another file than psctl is tested with: its hash is not among the known ones",
            hint="is the index to be trusted? runtime: {wheelhouse: FOLDER} installs files that you chose",
            where=host,
        )
    failures = [line for line in error.tail.splitlines() if line.startswith("ERROR")] or [error.message]
    return errors.PythonMissing(
        f"{host}: packages could not be installed: {failures[-1].removeprefix('ERROR: ')}",
        hint="no network there? runtime: {wheelhouse: FOLDER} sends wheels from this machine",
        where=host,
    )
