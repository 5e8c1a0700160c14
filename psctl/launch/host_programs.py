"""Runs psctl's own small programs on hosts: the source is sent along, the answer is JSON."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from psctl import errors
from psctl.launch.remote_programs.host_files import DISK_FULL
from psctl.remote.shell import InputStream, Shell
from psctl.types import UNDECODABLE

T = TypeVar("T")

HOST_STATE, HOST_FILES, NETWORK_CHECKS, LINK_PROBE, GPU_COPIES, DATA_FILES, URL_DATA, OUTPUT_FILES = (
    "host_state",
    "host_files",
    "network_checks",
    "link_probe",
    "gpu_copies",
    "data_files",
    "url_data",
    "output_files",
)
"""The programs, by the names of their modules in remote_programs/."""

_IMPORT = re.compile(r"^from psctl\.launch\.remote_programs\.(\w+) import (?:\([^)]*\)|[^(\n]*)\n", re.MULTILINE)


@cache
def program_source(program: str) -> str:
    """Return the source of a program; the source of another program that it imports replaces the import."""
    spec = importlib.util.find_spec(f"psctl.launch.remote_programs.{program}")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    return _IMPORT.sub(lambda found: program_source(found[1]).replace("from __future__ import annotations\n", ""), text)


def program_command(python: str, program: str, verb: str, question: Mapping[str, object]) -> list[str]:
    """Return the argv that runs a program. `-P` keeps its working folder out of the import path."""
    return [python, "-P", "-c", program_source(program), verb, json.dumps(question)]


OBJECT: msgspec.json.Decoder[dict[str, object]] = msgspec.json.Decoder(dict[str, object])
"""The answer of a program of which nothing is used."""


class SweptProcess(msgspec.Struct, frozen=True):
    """A process that is still there."""

    pid: int
    command: str


class SweepAnswer(msgspec.Struct, frozen=True):
    """The processes of a job that a sweep could not end."""

    left: list[SweptProcess]


SWEPT = msgspec.json.Decoder(SweepAnswer)


def run_program(
    shell: Shell,
    python: str,
    program: str,
    verb: str,
    question: Mapping[str, object],
    answer: msgspec.json.Decoder[T],
    *,
    stdin: bytes | InputStream = b"",
    timeout: float | None = 60,
) -> T:
    """Run a program on a host and return its answer.

    Args:
        shell: the host.
        python: an interpreter there, 3.11 or newer.
        program, verb, question: which of the programs, which of its verbs, its argument.
        answer: decoder of the answer, made at import: threads that have msgspec learn a type together crash it.
        stdin: data that the verb reads.
        timeout: seconds.

    Raises:
        DiskFull: the host's disk refused.
        CommandFailed: the program failed, or its answer is of another type.
        TimedOut, HostUnreachable: as `Shell.run`.
    """
    result = shell.run(program_command(python, program, verb, question), stdin=stdin, timeout=timeout, check=False)
    if result.status == DISK_FULL:
        text = result.stderr.decode(errors="replace").strip()
        raise errors.DiskFull(
            f"{shell.name}: {text}", hint="free space there, or set runtime.workdir", where=shell.name
        )
    if result.status != 0:
        tail = (result.stderr or result.stdout).decode(errors="replace")
        raise errors.CommandFailed(shell.name, f"{python} ({program} {verb})", result.status, tail)
    return read_answer(shell.name, f"{program} {verb}", answer, result.stdout)


def read_answer(host: str, command: str, answer: msgspec.json.Decoder[T], data: bytes | str) -> T:
    """Return a host's answer, whose form and types are checked before anything uses it.

    Args:
        host, command: the host and its command, for the error.
        answer: decoder of the answer.
        data: what the command printed.

    Raises:
        CommandFailed: the host answered something else: it runs another version, or it is compromised.
    """
    try:
        return answer.decode(data)
    except UNDECODABLE as error:
        raise errors.CommandFailed(host, command, 0, f"an unexpected answer: {error}") from error
