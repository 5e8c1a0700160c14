"""Installs packages into an environment on a host: decides the runs of pip, and carries them out.

psctl's own dependencies are installed in tested versions, and pip checks their hashes. torch is installed in the
requested version; if that is the tested one, its dependencies are installed in tested versions too. The user's
requirements are installed last, unpinned, and may replace the others within the ranges that psctl supports. A
wheelhouse is installed as it is: the operator chose its content, and the host verifies its hash.

Requirements and the index are passed over standard input, because either may contain a password.
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
"""A shell script. Arguments: the command of pip. Input: a line with the index or nothing, then requirements, which
`read` leaves to pip."""

_WRONG_HASH = "DO NOT MATCH THE HASHES"


class PipRun(msgspec.Struct, frozen=True):
    """One run of pip."""

    lines: tuple[str, ...]
    options: tuple[str, ...] = ()


def runs_of(packages: Sequence[str], pinned: Mapping[str, str], constraints: str) -> list[PipRun]:
    """Return the runs of pip that install packages.

    Args:
        packages: requirements; a package of `pinned` has the form NAME==VERSION.
        pinned: the requirement with hashes of each pinned package, by name; empty: nothing is pinned.
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
        pip: the command of pip on that host.
        options: pip's options in every run.
        runs: see `runs_of`.
        index: URL of the package index; None for the one that pip is configured with.

    Raises:
        DiskFull: the disk has no space left.
        PythonMissing: a package could not be installed.
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
    if _WRONG_HASH in error.tail:
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
