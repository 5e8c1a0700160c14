"""Commands of psctl to an agent: a Unix socket in the job's folder, which only this user can open.

The agent answers `hello`, `state`, `stop`, `stacks`, `spans` and `profile` itself; for `scale`, `read` and `orders` it
asks the coordinator, one at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from psctl.agent import supervisor
from psctl.agent.control_client import SOCKET
from psctl.agent.coordinator_link import FromCoordinator
from psctl.agent.step_rings import StepRings
from psctl.job.control_answers import (
    ControlAnswer,
    ControlError,
    ControlFailure,
    HelloAnswer,
    OrdersAnswer,
    ProfileAnswer,
    ReadAnswer,
    RunningProcess,
    ServerRows,
    SpansAnswer,
    StacksAnswer,
    StateAnswer,
    StopAnswer,
)
from psctl.job.message import JobMessage
from psctl.job.process_messages import (
    ClockIs,
    ClockWanted,
    HostAnswer,
    HostWanted,
    ScaleAnswer,
    ScaleWanted,
    Stacks,
    StopWanted,
)
from psctl.job.table_server_messages import ReadBy, ReadRows, ReadWanted
from psctl.orders import AgentOrders, HostOrder
from psctl.types import UNDECODABLE, Address, Count, Member, Name

T = TypeVar("T")

LONGEST = 1 << 16
"""Bytes of a request."""


class ControlRequest(msgspec.Struct, frozen=True):
    """One command of psctl."""

    command: str
    arguments: dict[str, object] = {}


class ControlRefused(Exception):
    """The command is unknown or invalid."""


class ControlSocket:
    """Answers requests on a thread of its own, one at a time.

    Args:
        job_dir: where the socket is made.
        private: a 0700 folder on the same disk, where the socket is made before it is moved: no other user can open it.
        answer: called with each request; raises ControlRefused.
    """

    def __init__(self, job_dir: Path, private: Path, answer: Callable[[ControlRequest], ControlAnswer]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                (private / SOCKET).unlink()
            self._socket.bind(f"/proc/self/fd/{folder}/{SOCKET}")  # the path itself may be too long for an address
        finally:
            os.close(folder)
        (private / SOCKET).chmod(0o600)
        (private / SOCKET).rename(job_dir / SOCKET)
        self._socket.listen(16)
        threading.Thread(target=self._listen, name="psctl control", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # descriptors are short for a moment, or the process ends
                threading.Event().wait(0.05)
                continue
            with caller, contextlib.suppress(OSError):  # the caller has ended
                if _user_of(caller) != os.getuid():
                    continue
                caller.settimeout(5.0)
                with caller.makefile("rb") as file:
                    caller.sendall(msgspec.json.encode(self._reply(file.readline(LONGEST))) + b"\n")

    def _reply(self, line: bytes) -> ControlAnswer | ControlFailure:
        try:
            return self._answer(msgspec.json.decode(line, type=ControlRequest))
        except (ControlRefused, *UNDECODABLE) as error:
            return ControlFailure(ControlError("refused", str(error)))


def _user_of(caller: socket.socket) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


ANSWER_TIMEOUT = 15.0
"""Seconds in which the coordinator must answer."""

NO_ANSWER = f"the coordinator did not answer within {ANSWER_TIMEOUT:.0f} s"

RECONNECT = 0.1
"""Seconds between two looks whether the coordinator is connected."""

READ_TIMEOUT = 5.0
"""Seconds for a read; a request to stop the job waits behind it."""


STACKS_TIMEOUT = 5.0
"""Seconds for the stacks of all processes; stack_requests.py gives them 2."""


CLOCK_QUESTIONS = 16
CLOCK_TIMEOUT = 1.0
"""Seconds for one question."""


class CoordinatorQueries:
    """Asks the coordinator, on the control socket's thread; the main thread passes answers to `add_answer`.

    Args:
        send: sends to the coordinator, or returns False when there is no connection.
    """

    def __init__(self, send: Callable[[JobMessage], bool]) -> None:
        self._send = send
        self._ticket = 0
        self._answers: queue.SimpleQueue[FromCoordinator] = queue.SimpleQueue()

    def add_answer(self, answer: FromCoordinator) -> None:
        """Add an answer; one to an earlier request is dropped when the next one is made."""
        self._answers.put(answer)

    def scale(self, workers: int | None, servers: int | None) -> ScaleAnswer:
        """Ask for other numbers of workers and servers; a coordinator that does not answer is a reason why not."""
        with contextlib.suppress(ControlRefused):
            for answer in self._ask(lambda ticket: ScaleWanted(ticket, workers, servers), ANSWER_TIMEOUT):
                if isinstance(answer.message, ScaleAnswer):
                    return answer.message
        return ScaleAnswer(self._ticket, 0, 0, NO_ANSWER, "try again in a moment; psctl status shows its state")

    def hosts(self, place: int, added: HostOrder | None) -> HostAnswer:
        """Ask for the job's hosts, to start the agent of one of them; see HostWanted.

        Raises:
            ControlRefused: the coordinator refuses the host.
        """
        for answer in self._ask(lambda ticket: HostWanted(ticket, place, added), ANSWER_TIMEOUT):
            if isinstance(answer.message, HostAnswer):
                if answer.message.problem:
                    raise ControlRefused(answer.message.problem)
                return answer.message
        raise ControlRefused(NO_ANSWER)

    def read(self, store: str, names: list[str], keys: list[int]) -> ReadAnswer:
        """Read keys of a store from all servers: return their number, and the answers that arrived in time."""
        asked: int | None = None
        found: list[ServerRows] = []
        for answer in self._ask(lambda ticket: ReadWanted(ticket, store, names, keys), READ_TIMEOUT):
            match answer.message:
                case ReadBy(servers=servers):
                    asked = servers
                case ReadRows():
                    found.append(ServerRows(**msgspec.structs.asdict(answer.message), payload=answer.payload))
            if len(found) == asked:
                break
        return ReadAnswer(asked, found)

    def clock(self) -> tuple[int, int] | None:
        """Return what to add to this host's monotonic clock to get the coordinator's, and the most by which that is
        wrong, in nanoseconds; None when the coordinator does not answer.

        Of several questions the one that was answered fastest counts: the coordinator's time lies between question and
        answer.
        """
        best: tuple[int, int] | None = None
        for _ in range(CLOCK_QUESTIONS):
            sent = time.monotonic_ns()
            try:
                answers = list(itertools.islice(self._ask(ClockWanted, CLOCK_TIMEOUT), 1))
            except ControlRefused:
                break
            for answer in answers:
                if isinstance(answer.message, ClockIs):
                    error = (answer.at - sent) // 2
                    if best is None or error < best[1]:
                        best = answer.message.time - sent - error, error
            if not answers:
                break
        return best

    def _ask(self, make: Callable[[int], JobMessage], patience: float) -> Iterator[FromCoordinator]:
        """Send a question as soon as there is a connection, and yield its answers until the time is over.

        Raises:
            ControlRefused: there was none in that time.
        """
        self._ticket += 1
        deadline = time.monotonic() + patience
        while not self._send(make(self._ticket)):
            if time.monotonic() >= deadline:
                raise ControlRefused("the coordinator is not connected now: try again")
            time.sleep(RECONNECT)
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                return
            if getattr(answer.message, "ticket", None) == self._ticket:
                yield answer


class StopRequested(msgspec.Struct, frozen=True):
    """A request of psctl to stop the job."""

    stop: StopWanted


class StacksRequested(msgspec.Struct, frozen=True):
    """A request of psctl for the stacks of the host's processes; the answers are put into the queue."""

    answers: queue.SimpleQueue[Stacks]


class AgentStatus(msgspec.Struct, frozen=True):
    """The agent's state at the time of a request."""

    job: str
    host: str
    coordinator: Address | None
    processes: list[tuple[Member, int]]  # with their process ids
    stopping: str


class _Scale(msgspec.Struct):
    workers: Count | None = None
    servers: Count | None = None


class _Stop(msgspec.Struct):
    save: bool = False
    force: bool = False
    by: Annotated[str, msgspec.Meta(max_length=256)] = "psctl stop"


class _Read(msgspec.Struct):
    store: Name
    names: list[Name]
    keys: list[Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]


class _Spans(msgspec.Struct):
    first: int = 1
    last: int = 0
    clock: bool = False


class _Profile(msgspec.Struct):
    rank: Count
    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class OrdersWanted(msgspec.Struct, frozen=True):
    """A request for the orders of the agent of another host (its index), which is to be started; its folders.

    `added`: the host is new to the job, and is added to it.
    """

    host: Count
    added: HostOrder | None
    python: str
    code: str
    workdir: str
    job_dir: str
    code_dir: str


def answer(
    request: ControlRequest, status: AgentStatus, put: Callable[[StopRequested | StacksRequested], None],
    queries: CoordinatorQueries, orders_for: Callable[[OrdersWanted], AgentOrders], rings: StepRings,
    profile_of: Callable[[int], str],
) -> ControlAnswer:  # fmt: skip
    """Return the answer to one request.

    Args:
        request: of psctl.
        status: of the agent.
        put: takes events for the agent's main thread.
        queries: sends requests to the coordinator.
        orders_for: makes the orders of another host's agent.
        rings: the times of steps.
        profile_of: returns the file to which a worker writes its profile.

    Raises:
        ControlRefused: the request is unknown or invalid.
    """
    match request.command:
        case "hello":
            return _hello(status)
        case "state":
            processes = [RunningProcess(each.role, each.rank, pid) for each, pid in status.processes]
            return StateAnswer(**msgspec.structs.asdict(_hello(status)), processes=processes, stopping=status.stopping)
        case "stop":
            stop = _arguments(request, _Stop)
            put(StopRequested(StopWanted(stop.save, stop.force, stop.by)))
            return StopAnswer(accepted=True)
        case "scale":
            numbers = _arguments(request, _Scale)
            return queries.scale(numbers.workers, numbers.servers)
        case "read":
            wanted = _arguments(request, _Read)
            return queries.read(wanted.store, wanted.names, wanted.keys)
        case "stacks":
            return _stacks(status, put)
        case "spans":
            steps = _arguments(request, _Spans)
            offset, error = (queries.clock() if steps.clock else None) or (0, None)
            return SpansAnswer(rings.read(steps.first, steps.last), offset, error)
        case "profile":
            profile = _arguments(request, _Profile)
            runs = rings.request_profile(profile.rank, profile.steps)
            return ProfileAnswer(profile_of(profile.rank) if runs else "")
        case "orders":
            return OrdersAnswer(orders_for(_arguments(request, OrdersWanted)))
        case _:
            raise ControlRefused(f"unknown command: {request.command}")


def _stacks(status: AgentStatus, put: Callable[[StacksRequested], None]) -> StacksAnswer:
    """Return the stacks of the host's processes; of one that does not answer, the reason."""
    answers: queue.SimpleQueue[Stacks] = queue.SimpleQueue()
    put(StacksRequested(answers))
    found: dict[Member, Stacks] = {}
    missing = {member for member, _ in status.processes}
    deadline = time.monotonic() + STACKS_TIMEOUT
    while missing:
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[answer.member] = answer
        missing.discard(answer.member)
    late = [
        Stacks(member, (), (), f"no answer within {STACKS_TIMEOUT:.0f} s: it has ended or hangs") for member in missing
    ]
    return StacksAnswer(sorted([*found.values(), *late], key=lambda each: each.member))


def _arguments(request: ControlRequest, kind: type[T]) -> T:
    try:
        return msgspec.convert(request.arguments, kind)
    except msgspec.ValidationError as error:
        raise ControlRefused(str(error)) from error


def _hello(status: AgentStatus) -> HelloAnswer:
    parent = os.getppid()
    return HelloAnswer(status.job, status.host, parent, supervisor.identity(parent), status.coordinator)
