"""The state machine of a job of two workers, step by step: instructions are recorded and not carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    AppendEvent,
    CloseCoordinator,
    CommitCheckpoint,
    Connected,
    Instruction,
    PlanMade,
    SendMessage,
    ShardsMade,
    StartMember,
    Tick,
)
from psctl.job import events
from psctl.job.checkpoint_messages import SaveBegin, SaveEnd
from psctl.job.membership_messages import LostWorkerClocks, Reassign, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import (
    ProcessStarted,
    ScaleAnswer,
    ScaleWanted,
)
from psctl.job.training_messages import Join, MemberReady, Prepare, StepReport, WorkerReport
from psctl.orders import CheckpointOrder, JobOrder
from psctl.types import Address, Assignment, Layout, Member, ParameterInfo, Range, Shard
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.state_machine_driver import StateMachineDriver

LAYOUT = Layout((ParameterInfo("w", (2,), "float32", 0),), "SGD", ({"lr": 0.1},))
PLAN = events.Planned(time=0, size=8, world=2, chosen="ps", reason="asked", decided=True, candidates=[])

ORDER = make_order(
    make_hosts(1, 1), name="digits-3", checkpoint=CheckpointOrder(None, 500, 0.0, 3, None, True, 1), restarts=0
)

W0, W1, S0 = Member("worker", 0), Member("worker", 1), Member("server", 0)
A0, A1 = Member("agent", 0), Member("agent", 1)
S = [Member("server", rank) for rank in range(3)]
S3 = Member("server", 3)
AGENTS = {W0: A0, W1: A1, S[0]: A0, S[1]: A1, S[2]: A0, S3: A1}

ELASTIC = replace(ORDER, servers=3, restarts=9, replicas=1, on_worker_loss="wait")
"""Under ps with the optimizer on three servers: the loss of a server or a worker is survived without a restart."""

SHARDS = [Shard(index, "float32", Range(index, index + 1)) for index in range(6)]


class DrivenJob(StateMachineDriver):
    """A job's state machine, and all instructions that it has returned."""

    def __init__(self, order: JobOrder = ORDER) -> None:
        self.now = 0.0
        self.instructions: list[Instruction] = []
        super().__init__(order)
        self.begin()

    def time(self) -> float:
        return self.now

    def carry_out(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def agent_of(self, member: Member) -> Member:
        return AGENTS[replace(member, incarnation=0)]

    def wait(self, seconds: float) -> list[Instruction]:
        """Advance time in ticks of a tenth of a second (of one second, for long times)."""
        new, end = [], self.now + seconds
        step = 0.1 if seconds <= 20 else 1.0
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            new += self.handle(Tick())
        return new

    # ---- the start: each returns the job itself ----------------------------------------------------------------------

    def registered(self) -> DrivenJob:
        self.register()
        return self

    def running(self) -> DrivenJob:
        self.registered()
        self.receive(A0, ProcessStarted(W0, 100))
        self.receive(A1, ProcessStarted(W1, 101))
        return self

    def prepared(self) -> DrivenJob:
        self.running()
        for worker in (W0, W1):
            self.handle(Connected(worker))
            self.receive(worker, Join(1))
            self.receive(worker, Prepare(LAYOUT, ()))
        return self

    def training(self, servers: Sequence[int] = (0,), shards: Sequence[Shard] = ()) -> DrivenJob:
        """Train under ps with a server on each of these hosts."""
        self.prepared()
        self.handle(PlanMade("ps", "server", list(servers), PLAN))
        for server in S[: len(servers)]:
            self.listens(server)
        self.handle(ShardsMade(list(shards), [8] * len(shards)))
        self.receive(W0, MemberReady())
        self.receive(W1, MemberReady())
        return self

    # ---- processes ---------------------------------------------------------------------------------------------------

    def listens(self, server: Member, agent: Member | None = None) -> list[Instruction]:
        """Let a server start, join and listen."""
        port = 4000 + server.rank + 10 * server.incarnation
        return [*self.joins(server, agent), *self.receive(server, MemberReady(Address("10.0.0.1", port)))]

    def train_again(self, incarnation: int) -> list[Instruction]:
        """Let all ranks that a restart has ordered start and train."""
        w0, w1, s0 = (replace(each, incarnation=incarnation) for each in (W0, W1, S0))
        new = [each for member in (w0, w1) for each in self.joins(member)] + self.listens(s0)
        for worker in (w0, w1):
            new += self.receive(worker, Prepare(LAYOUT, ()))
        new += self.handle(ShardsMade([], []))
        for worker in (w0, w1):
            new += self.receive(worker, MemberReady())
        return new

    def report(self, member: Member, step: int, *, rested: int = 0, **metrics: float) -> list[Instruction]:
        steps = [StepReport(step, 0, 1.0, metrics)] if metrics else []
        return self.receive(member, WorkerReport(step, 0, steps, 10.0, 0.1, 0.1, (("", 100, 0),), rested=rested))

    def saves(self, step: int) -> list[CommitCheckpoint]:
        """Let all senders send their parts of a checkpoint; return the resulting commits."""
        new = [each for member in (W0, W1, S0) for each in self.receive(member, SaveBegin(step, []))]
        new += [each for member in (W0, W1, S0) for each in self.receive(member, SaveEnd(step))]
        return commits(new)

    @property
    def finished(self) -> events.Finished:
        """The last event, after which the coordinator closes."""
        found = [each.event for each in self.instructions if isinstance(each, AppendEvent)]
        assert isinstance(found[-1], events.Finished), found[-1]
        assert isinstance(self.instructions[-1], CloseCoordinator)
        return found[-1]


def commits(new: list[Instruction]) -> list[CommitCheckpoint]:
    return [each for each in new if isinstance(each, CommitCheckpoint)]


def appended(new: list[Instruction], kind: type) -> list[Any]:
    return [each.event for each in new if isinstance(each, AppendEvent) and isinstance(each.event, kind)]


def sent(new: list[Instruction], kind: type) -> list[tuple[Member, Any]]:
    return [
        (each.member, each.message) for each in new if isinstance(each, SendMessage) and isinstance(each.message, kind)
    ]


def notices(new: list[Instruction]) -> list[str]:
    return [event.text for event in appended(new, events.Notice)]


def started(new: list[Instruction]) -> list[tuple[Member, int]]:
    """Return the members whose start is ordered, and their hosts."""
    return [(each.member, each.host) for each in new if isinstance(each, StartMember)]


def training(order: JobOrder = ELASTIC) -> DrivenJob:
    """Return a job that trains on three servers, whose shards have replicas."""
    return DrivenJob(order).training([0, 1, 0], SHARDS)


def again(member: Member) -> Member:
    return replace(member, incarnation=member.incarnation + 1)


def answer(job: DrivenJob, server: Member, clock: int, shards: list[int], version: int | None = None) -> list:  # type: ignore[type-arg]
    held = dict.fromkeys(shards, clock)
    return job.receive(
        server,
        LostWorkerClocks(1, 0, held, dict.fromkeys(shards, clock if version is None else version)),
    )


def asks(job: DrivenJob, workers: int | None = None, servers: int | None = None) -> ScaleAnswer:
    new = job.receive(A0, ScaleWanted(7, workers, servers))
    ((member, answer),) = sent(new, ScaleAnswer)
    assert (member, answer.ticket) == (A0, 7)
    found: ScaleAnswer = answer
    return found


def newest(job: DrivenJob) -> Assignment:
    found: Assignment = sent(job.instructions, Reassign)[-1][1].assignment
    return found


def move(job: DrivenJob) -> None:
    """Let every copy catch up, and every hand-over finish."""
    before = newest(job)
    for shard, copying in enumerate(before.copies):
        for server in copying:
            job.receive(Member("server", before.owners[shard]), ShardCaughtUp(before.epoch, shard, server))
    job.wait(0.1)
    after = newest(job)
    for shard, (old, new) in enumerate(zip(before.owners, after.owners, strict=True)):
        if old != new:
            job.receive(Member("server", old), ShardHandedOver(after.epoch, shard))
