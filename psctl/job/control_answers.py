"""Answers of an agent to the commands of psctl: hello, state, stop, scale, read, stacks, spans, profile, orders.

They are JSON documents.
"""

from __future__ import annotations

import msgspec

from psctl.job.process_messages import ScaleAnswer, Stacks
from psctl.job.table_server_messages import ReadRows
from psctl.orders import AgentOrders
from psctl.types import Address, Role


class HelloAnswer(msgspec.Struct, frozen=True):
    """The agent's job, host and process; `coordinator` is None until the coordinator listens."""

    job: str
    host: str
    pid: int
    started: str | None
    coordinator: Address | None


class RunningProcess(msgspec.Struct, frozen=True):
    """A process of the job that the agent has started."""

    role: Role
    rank: int
    pid: int


class StateAnswer(HelloAnswer, frozen=True):
    """As HelloAnswer, with the running processes; `stopping` is the origin of a request to stop, "" without one."""

    processes: list[RunningProcess]
    stopping: str


class StopAnswer(msgspec.Struct, frozen=True):
    """The agent has taken the request to stop."""

    accepted: bool


class ServerRows(ReadRows, frozen=True, tag="ReadRows"):
    """ReadRows of one server, with its payload."""

    payload: bytes = b""


class ReadAnswer(msgspec.Struct, frozen=True):
    """The number of servers that were asked, None without an answer of the coordinator; and the answers in time."""

    servers: int | None
    answers: list[ServerRows]


class StacksAnswer(msgspec.Struct, frozen=True):
    """The stacks of the host's processes of the job."""

    processes: list[Stacks]


class RankSpans(msgspec.Struct, frozen=True):
    """The times of a worker's steps: the steps that it holds and has finished, and the spans of those that were asked
    for: kind (process/step_ring.py), step, begin, end; nanoseconds of its host's monotonic clock."""

    rank: int
    first: int  # 0: none
    last: int
    spans: list[tuple[str, int, int, int]]


class SpansAnswer(msgspec.Struct, frozen=True):
    """The times of steps of the host's workers.

    `offset`: what to add to the host's clock to get the coordinator's, in nanoseconds; `clock_error`: the most by
    which that is wrong; None: the coordinator did not answer.
    """

    workers: list[RankSpans]
    offset: int = 0
    clock_error: int | None = None


class ProfileAnswer(msgspec.Struct, frozen=True):
    """The worker was asked for a profile, which it will write to `path`; "": it does not run on this host."""

    path: str


class OrdersAnswer(msgspec.Struct, frozen=True):
    """The orders of an agent that is to be started again, with its keys and the job's secrets."""

    orders: AgentOrders


class ControlError(msgspec.Struct, frozen=True):
    """The reason of a refusal. Code `gone`: no agent listens; `refused`: the command is unknown or invalid."""

    code: str
    message: str


class ControlFailure(msgspec.Struct, frozen=True):
    """The answer to a command that was refused."""

    error: ControlError


ControlAnswer = (
    HelloAnswer | StopAnswer | ScaleAnswer | ReadAnswer | StacksAnswer | SpansAnswer | ProfileAnswer | OrdersAnswer
)
"""What an agent answers to a command that it takes; StateAnswer is a HelloAnswer."""
