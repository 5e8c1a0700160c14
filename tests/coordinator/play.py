"""A coordinator's mind that is played with: what it hears, at what time, and what it said."""

from __future__ import annotations

from typing import Any

from psctl.coordinator.state.instructions import (
    AppendEvent,
    CloseCoordinator,
    CommitCheckpoint,
    Connected,
    ConnectionLost,
    Input,
    Instruction,
    MessageReceived,
    PlanMade,
    SendMessage,
    ShardsMade,
    Tick,
)
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.job import events
from psctl.job.checkpoint_messages import SaveBegin, SaveEnd
from psctl.job.message import JobMessage
from psctl.job.process_messages import ProcessExited, ProcessFailure, ProcessStarted, Register
from psctl.job.training_messages import Join, MemberReady, Prepare, StepReport, WorkerReport
from psctl.orders import CheckpointOrder, HostOrder, JobOrder
from psctl.types import Address, Layout, Member, ParameterInfo

LAYOUT = Layout((ParameterInfo("w", (2,), "float32", 0),), "SGD", ({"lr": 0.1},))
PLAN = events.Planned(time=0, size=8, world=2, chosen="ps", reason="asked", decided=True, candidates=[])

ORDER = JobOrder(
    name="digits-3", argv=["train.py"],
    hosts=[HostOrder("h0", "10.0.0.1", "eth0", 4, 0, 1, True), HostOrder("h1", "10.0.0.2", "eth0", 4, 0, 1, True)],
    servers=1, strategy="ps", update="server", seed=0, size=None, start_timeout=120.0, stall_timeout=300.0,
    total_timeout=None, report_seconds=1.0, ports=None,
    checkpoint=CheckpointOrder(None, 500, 0.0, 3, None, True, 1), resume=None, resume_id=None, code_hash="c",
    job_file="", environment={}, congestion="auto", restarts=0,
)  # fmt: skip

W0, W1, S0 = Member("worker", 0), Member("worker", 1), Member("server", 0)
A0, A1 = Member("agent", 0), Member("agent", 1)
AGENTS = {W0: A0, W1: A1, S0: A0, Member("server", 1): A1, Member("server", 2): A0}


class Play:
    """A mind and what it said so far."""

    def __init__(self, order: JobOrder = ORDER) -> None:
        self.now = 0.0
        self.mind = JobStateMachine(order, 5.0, None, 0.0, 1000.0)
        self.said: list[Instruction] = self.mind.start(0.0)

    def __call__(self, *happenings: Input) -> list[Instruction]:
        new = [each for happening in happenings for each in self.mind.handle(happening, self.now)]
        self.said += new
        return new

    def hear(self, member: Member, message: JobMessage) -> list[Instruction]:
        return self(MessageReceived(member, message))

    def wait(self, seconds: float) -> list[Instruction]:
        """Let time pass in ticks of a tenth of a second (of a second, where it is long)."""
        new, end = [], self.now + seconds
        step = 0.1 if seconds <= 20 else 1.0
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            new += self(Tick())
        return new

    def registered(self) -> Play:
        self.hear(A0, Register("h0", 1, 4, 1, 0))
        self.hear(A1, Register("h1", 1, 4, 1, 0))
        return self

    def running(self) -> Play:
        self.registered()
        self.hear(A0, ProcessStarted(W0, 100))
        self.hear(A1, ProcessStarted(W1, 101))
        return self

    def prepared(self) -> Play:
        self.running()
        for worker in (W0, W1):
            self(Connected(worker))
            self.hear(worker, Join(1))
            self.hear(worker, Prepare(LAYOUT, ()))
        return self

    def training(self) -> Play:
        self.prepared()
        self(PlanMade("ps", "server", [0], PLAN))
        self.hear(A0, ProcessStarted(S0, 102))
        self(Connected(S0))
        self.hear(S0, Join(102))
        self.hear(S0, MemberReady(Address("10.0.0.1", 4000)))
        self(ShardsMade([], []))
        self.hear(W0, MemberReady())
        self.hear(W1, MemberReady())
        return self

    def train_again(self, incarnation: int) -> list[Instruction]:
        """All ranks that a restart ordered come up to the first step."""
        new: list[Instruction] = []
        w0, w1, s0 = (Member(each.role, each.rank, incarnation) for each in (W0, W1, S0))
        for member in (s0, w0, w1):
            new += self.hear(AGENTS[Member(member.role, member.rank)], ProcessStarted(member, 200))
            new += [*self(Connected(member)), *self.hear(member, Join(200))]
        new += self.hear(s0, MemberReady(Address("10.0.0.1", 4001)))
        for worker in (w0, w1):
            new += self.hear(worker, Prepare(LAYOUT, ()))
        new += self(ShardsMade([], []))
        for worker in (w0, w1):
            new += self.hear(worker, MemberReady())
        return new

    def exits(self, member: Member, status: int = 0, exception: str = "", code: str = "") -> list[Instruction]:
        failure = None
        if status:
            failure = ProcessFailure(
                str(member), "h", status, 0.0, 0, exception or f"status {status}", [], [], code=code
            )
        return [
            *self(ConnectionLost(member, "closed")),
            *self.hear(AGENTS[Member(member.role, member.rank)], ProcessExited(member, status, failure)),
        ]

    def report(self, member: Member, step: int, *, rested: int = 0, **metrics: float) -> list[Instruction]:
        steps = [StepReport(step, 0, 1.0, metrics)] if metrics else []
        return self.hear(member, WorkerReport(step, 0, steps, 10.0, 0.1, 0.1, 100, rested=rested))

    def saves(self, step: int) -> list[CommitCheckpoint]:
        """All senders send their parts of a checkpoint; returns what is committed then."""
        new = [said for member in (W0, W1, S0) for said in self.hear(member, SaveBegin(step, []))]
        new += [said for member in (W0, W1, S0) for said in self.hear(member, SaveEnd(step))]
        return commits(new)

    @property
    def last(self) -> events.Finished:
        found = [each.event for each in self.said if isinstance(each, AppendEvent)]
        assert isinstance(found[-1], events.Finished), found[-1]
        assert isinstance(self.said[-1], CloseCoordinator)
        return found[-1]


def commits(said: list[Instruction]) -> list[CommitCheckpoint]:
    return [each for each in said if isinstance(each, CommitCheckpoint)]


def appended(said: list[Instruction], kind: type) -> list[Any]:
    return [each.event for each in said if isinstance(each, AppendEvent) and isinstance(each.event, kind)]


def told(said: list[Instruction], kind: type) -> list[tuple[Member, Any]]:
    return [
        (each.member, each.message) for each in said if isinstance(each, SendMessage) and isinstance(each.message, kind)
    ]
