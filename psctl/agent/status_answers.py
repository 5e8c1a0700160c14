"""What an agent answers psctl, which asks over its socket: who it is, what runs here, that a stop is under way."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from psctl.agent import supervisor
from psctl.agent.control_socket import ControlRefused, ControlRequest
from psctl.agent.coordinator_queries import CoordinatorQueries
from psctl.job.process_messages import StopWanted
from psctl.types import Address, Count, Member, Name


class StopRequested(msgspec.Struct, frozen=True):
    """psctl wants the job to stop."""

    stop: StopWanted


class AgentStatus(msgspec.Struct, frozen=True):
    """Where the agent stands when it is asked."""

    job: str
    host: str
    coordinator: Address | None
    processes: list[tuple[Member, int]]  # with their process ids
    stopping: str


class _Scale(msgspec.Struct):
    workers: Count | None = None
    servers: Count | None = None


class _Stop(msgspec.Struct):
    save: bool
    force: bool
    by: Annotated[str, msgspec.Meta(max_length=256)]


class _Read(msgspec.Struct):
    store: Name
    names: list[Name]
    keys: list[Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]


def answer(
    request: ControlRequest, standing: AgentStatus, put: Callable[[StopRequested], None], questions: CoordinatorQueries
) -> dict[str, Any]:
    """Answer one request; Refused when it is unknown or wrong.

    Args:
        put: takes what the agent's main thread has to do.
        questions: what the coordinator is asked.
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
                raise ControlRefused(str(error)) from error
            put(StopRequested(StopWanted(stop.save, stop.force, stop.by)))
            return {"accepted": True}
        case "scale":
            return questions.scale(**_arguments(request, _Scale))
        case "read":
            return questions.read(**_arguments(request, _Read))
        case _:
            raise ControlRefused(f"no such command: {request.command}")


def _arguments(request: ControlRequest, kind: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        return msgspec.structs.asdict(msgspec.convert(request.arguments, kind))
    except msgspec.ValidationError as error:
        raise ControlRefused(str(error)) from error


def _hello(standing: AgentStatus) -> dict[str, Any]:
    kept_by = os.getppid()
    return {
        "job": standing.job,
        "host": standing.host,
        "pid": kept_by,
        "started": supervisor.identity(kept_by),
        "coordinator": msgspec.to_builtins(standing.coordinator) if standing.coordinator else None,
    }
