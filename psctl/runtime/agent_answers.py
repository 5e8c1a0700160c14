"""What an agent answers psctl, which asks over its socket: who it is, what runs here, that a stop is under way."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from psctl.job.messages import ScaleAnswer, StopWanted
from psctl.runtime.agent_socket import Refused, Request
from psctl.words import Address, Member


class Asked(msgspec.Struct, frozen=True):
    """psctl wants the job to stop."""

    stop: StopWanted


class Scaling(msgspec.Struct, frozen=True):
    """psctl wants more or fewer processes; `answer` takes what the coordinator says."""

    workers: int | None
    servers: int | None
    answer: queue.SimpleQueue[ScaleAnswer]


class Standing(msgspec.Struct, frozen=True):
    """Where the agent stands when it is asked."""

    job: str
    host: str
    coordinator: Address | None
    master: Address | None
    processes: list[tuple[Member, int]]  # with their process ids
    stopping: str


PATIENCE = 15.0
"""Seconds in which the coordinator must answer."""


class _Scale(msgspec.Struct):
    workers: int | None = None
    servers: int | None = None


class _Stop(msgspec.Struct):
    save: bool
    force: bool
    by: str


def answer(request: Request, standing: Standing, put: Callable[[Asked | Scaling], None]) -> dict[str, Any]:
    """Answer one request; Refused when it is unknown or wrong.

    Args:
        put: takes what the agent's main thread has to do.
    """
    match request.command:
        case "hello":
            return _hello(standing)
        case "state":
            processes = [{"role": each.role, "rank": each.rank, "pid": pid} for each, pid in standing.processes]
            return {**_hello(standing), "processes": processes, "stopping": standing.stopping}
        case "stop":
            try:
                stop = msgspec.convert({"by": "psctl stop", "save": False, "force": False, **request.arguments}, _Stop)
            except msgspec.ValidationError as error:
                raise Refused(str(error)) from error
            put(Asked(StopWanted(stop.save, stop.force, stop.by)))
            return {"accepted": True}
        case "scale":
            return _scaled(request, put)
        case _:
            raise Refused(f"no such command: {request.command}")


def _scaled(request: Request, put: Callable[[Asked | Scaling], None]) -> dict[str, Any]:
    try:
        asked = msgspec.convert(request.arguments, _Scale)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from error
    answers: queue.SimpleQueue[ScaleAnswer] = queue.SimpleQueue()
    put(Scaling(asked.workers, asked.servers, answers))
    try:
        found = answers.get(timeout=PATIENCE)
    except queue.Empty:
        raise Refused(f"the coordinator did not answer within {PATIENCE:.0f} s") from None
    return {name: getattr(found, name) for name in ("workers", "servers", "problem", "hint")}


def _hello(standing: Standing) -> dict[str, Any]:
    mine = psutil.Process(os.getppid())
    return {
        "job": standing.job,
        "host": standing.host,
        "pid": mine.pid,
        "started": mine.create_time(),
        "coordinator": msgspec.to_builtins(standing.coordinator) if standing.coordinator else None,
        "master": msgspec.to_builtins(standing.master) if standing.master else None,
    }
