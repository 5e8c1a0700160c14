"""Inputs a second that the coordinator's state machine and its journal handle, by the size of the job: two tables.

    python bench/coordinator.py [--workers 10,100,1000] [--seconds 2]

There is no network: N workers and N/10 servers on N/10 hosts start, train (in each step every worker sends a report and
a heartbeat, every server a heartbeat, and there are ten ticks), and lose servers and workers. `start` is from the first
agent's registration to the first step, `train` while training, `losses` from the end of a server to the moment at which
its replacement holds its share, and from the end of a worker to its replacement's first step.

The second table has the journal: the time that an input takes with it, snapshots included, and without; the size of a
snapshot; and the time in which a new coordinator restores the state from a journal that is full.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from psctl.coordinator.journal import MOST_INPUTS, CoordinatorState, Journal, NoCopy, apply, restore
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import (
    Connected,
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
from psctl.job.membership_messages import LostWorkerClocks, Reassign, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import ProcessExited, ProcessFailure, ProcessStarted, Register
from psctl.job.training_messages import (
    MOST_PEERS,
    Decision,
    Heartbeat,
    Join,
    MemberReady,
    Prepare,
    StepReport,
    WorkerReport,
)
from psctl.orders import CheckpointOrder, HostOrder, JobOrder
from psctl.process.journal_files import SNAPSHOT
from psctl.types import Address, Assignment, Layout, Member, ParameterInfo, Range, Shard

LAYOUT = Layout((ParameterInfo("w", (1000,), "float32", 0),), "SGD", ({"lr": 0.1},))
SHARDS_A_SERVER = 8


def order(workers: int, hosts: int) -> JobOrder:
    """Return a job of so many workers, spread evenly."""
    share = workers // hosts
    places = [HostOrder(f"h{n}", f"10.0.{n // 250}.{n % 250}", "eth0", 16, 0, share, True) for n in range(hosts)]
    return JobOrder(
        name="bench-1", argv=["train.py"], hosts=places, servers=None, strategy="ps", update="server", seed=0,
        size=None, start_timeout=120.0, stall_timeout=300.0, total_timeout=None, report_seconds=1.0, ports=None,
        checkpoint=CheckpointOrder(None, 100, 0.0, 3, None, True, 1), resume=None, resume_id=None, code_hash="c",
        job_file="", environment={}, congestion="auto", restarts=1000, replicas=1, on_worker_loss="wait",
    )  # fmt: skip


class SimulatedJob:
    """A state machine, a clock that is set, and counts."""

    def __init__(self, workers: int) -> None:
        self.hosts = max(2, workers // 10)
        self.count = max(2, workers // 10)
        self.order = order(workers - workers % self.hosts, self.hosts)
        self.now = 0.0
        self.machine = JobStateMachine(self.order, 5.0, None, 0.0, 0.0)
        self.workers = [Member("worker", rank) for rank in range(sum(host.workers for host in self.order.hosts))]
        self.servers = [Member("server", rank) for rank in range(self.count)]
        self.machine.start(0.0)
        self.handled, self.spent = 0, 0.0
        self.journal: Journal | None = None
        self.sessions = MemberSessions()
        self.assignment: Assignment | None = None
        self.step = 0

    def __call__(self, inputs: Iterator[Input]) -> list[Instruction]:
        """Handle all; the time that it takes to make them up is not counted."""
        every, out = list(inputs), []
        began = time.perf_counter()
        for each in every:
            if self.journal is None:
                out += self.machine.handle(each, self.now)
            else:
                self.journal.append([each], self.now)
                out += apply(self.state, each, self.now)
        self.spent += time.perf_counter() - began
        self.handled += len(every)
        for instruction in out:
            if isinstance(instruction, SendMessage) and isinstance(instruction.message, Decision | Reassign):
                self.assignment = instruction.message.assignment
        for session in self.sessions.by_member.values():
            session.acknowledge(session.next)
        return out

    @property
    def state(self) -> CoordinatorState:
        """What a snapshot holds."""
        return CoordinatorState(0, self.machine, self.sessions)

    @property
    def newest(self) -> Assignment:
        """The newest assignment that was sent."""
        assert self.assignment is not None, "training has begun"
        return self.assignment

    def agent(self, member: Member) -> Member:
        """Return the agent of a member's host."""
        host = member.rank % self.hosts if member.role == "server" else member.rank // (len(self.workers) // self.hosts)
        return Member("agent", host)

    def start(self) -> None:
        """From the first agent's registration to the first step."""
        self(MessageReceived(Member("agent", n), Register()) for n in range(self.hosts))
        self(MessageReceived(self.agent(each), ProcessStarted(each, 100)) for each in self.workers)
        for message in (Join(1), Prepare(LAYOUT, ())):
            self(given for each in self.workers for given in (Connected(each), MessageReceived(each, message)))
        plan = events.Planned(time=0, size=1, world=1, chosen="ps", reason="", decided=True, candidates=[])
        self(iter([PlanMade("ps", "server", [n % self.hosts for n in range(self.count)], plan)]))
        for server in self.servers:
            self.listens(server)
        shards = [Shard(n, "float32", Range(n, n + 1)) for n in range(SHARDS_A_SERVER * self.count)]
        self(iter([ShardsMade(shards, [4 << 20] * len(shards))]))
        self(MessageReceived(each, MemberReady()) for each in self.workers)
        assert self.machine.state == "running"

    def listens(self, server: Member) -> None:
        """A server starts to listen."""
        self(
            iter([
                MessageReceived(self.agent(server), ProcessStarted(server, 200)), Connected(server),
                MessageReceived(server, Join(1)), MessageReceived(server, MemberReady(Address("10.0.0.1", 4000 +
                server.rank))),
            ])
        )  # fmt: skip

    def train(self) -> None:
        """One step of all, and a second of ticks."""
        self.step += 1
        number = StepReport(self.step, 0, 64.0, {"loss": 0.5})
        moved = tuple((str(each), 1 << 20, 1 << 20) for each in self.servers[:MOST_PEERS])
        report = WorkerReport(self.step, 0, [number], 64.0, 0.1, 0.05, moved)
        self(MessageReceived(each, report) for each in self.workers)
        self(MessageReceived(each, Heartbeat(self.step, "sync: waiting for server/0")) for each in self.workers)
        self(MessageReceived(each, Heartbeat(self.step, "serving")) for each in self.servers)
        for _ in range(10):
            self.now += 0.1
            self(iter([Tick()]))

    def lose_a_server(self) -> None:
        """A server is lost, is replaced, and its replacement gets its share."""
        lost = self.servers[1]
        self(iter([self.killed(lost)]))
        self.servers[1] = new = Member("server", 1, lost.incarnation + 1)
        self.listens(new)
        while any(self.newest.copies):
            now = self.newest
            heads = {each.rank: each for each in self.servers}
            self(
                MessageReceived(heads[now.chains[shard][0]], ShardCaughtUp(now.epoch, shard, server))
                for shard, found in enumerate(now.copies)
                for server in found
            )
            self.now += 0.1
            self(iter([Tick()]))
            before, after = now.owners, self.newest.owners
            self(
                MessageReceived(heads[before[shard]], ShardHandedOver(self.newest.epoch, shard))
                for shard in range(len(before))
                if after[shard] != before[shard]
            )

    def lose_a_worker(self) -> None:
        """A worker is lost; servers report the clocks that they have of it; its replacement trains."""
        lost = self.workers[1]
        self(iter([self.killed(lost)]))
        owners = self.newest.owners
        self(
            MessageReceived(server, LostWorkerClocks(lost.rank, lost.incarnation, held, held))
            for server in self.servers
            if (held := {shard: self.step - 1 for shard, owner in enumerate(owners) if owner == server.rank})
        )
        self.workers[1] = new = Member("worker", 1, lost.incarnation + 1)
        ready = [Join(1), Prepare(LAYOUT, ()), MemberReady()]
        self(iter([Connected(new), *(MessageReceived(new, message) for message in ready)]))

    def killed(self, member: Member) -> Input:
        """Return the report of a kill -9."""
        failure = ProcessFailure(str(member), "h", -9, 0.0, 0, "killed by signal 9 (SIGKILL)", [], [])
        return MessageReceived(self.agent(member), ProcessExited(member, -9, failure))

    def rate(self) -> tuple[int, float]:
        """Return events and seconds since the last call."""
        found = self.handled, self.spent
        self.handled, self.spent = 0, 0.0
        return found


def measure(workers: int, seconds: float) -> str:
    """Return one line of the table."""
    job = SimulatedJob(workers)
    job.start()
    start = job.rate()
    while job.spent < seconds:
        job.train()
    train = job.rate()
    for _ in range(3):
        job.lose_a_server()
        job.lose_a_worker()
    losses = job.rate()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(3):
        job.train()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    tracemalloc.start()
    other = SimulatedJob(workers)
    other.start()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    cells = [f"{count / max(spent, 1e-9):>12,.0f}" for count, spent in (start, train, losses)]
    return (
        f"{len(job.workers):>8,}{job.count:>9,}{''.join(cells)}{1e6 * train[1] / train[0]:>12.1f}"
        f"{size / 1e6:>10.1f}{grown / 3e3:>12.1f}"
    )


def measure_journal(workers: int, seconds: float) -> str:
    """Return one line of the second table."""
    job = SimulatedJob(workers)
    job.start()
    job.train()
    cells = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for journaled in (True, False):
            job.journal = Journal(folder, job.state, NoCopy()) if journaled else None
            job.rate()
            while job.spent < seconds:
                job.train()
            count, spent = job.rate()
            cells.append(f"{1e6 * spent / count:>12.1f}")
        size = (folder / SNAPSHOT).stat().st_size
        job.journal = Journal(folder, job.state, NoCopy())
        tick = Tick()
        for _ in range(MOST_INPUTS - 1):
            job.journal.append([tick], job.now)
        began = time.perf_counter()
        restore(folder)
        spent = time.perf_counter() - began
    return f"{len(job.workers):>8,}{job.count:>9,}{''.join(cells)}{size / 1e3:>12.1f}{spent * 1e3:>12.1f}"


def main() -> int:
    """Print the tables."""
    arguments = argparse.ArgumentParser(description="inputs a second of the coordinator")
    arguments.add_argument("--workers", default="10,100,1000")
    arguments.add_argument("--seconds", type=float, default=2.0)
    asked = arguments.parse_args()
    print(f"{'':>8}{'':>9}{'inputs a second':^36}{'us an input':>12}{'memory':>10}{'grows by':>12}")
    print(
        f"{'workers':>8}{'servers':>9}{'start':>12}{'train':>12}{'losses':>12}{'train':>12}{'MB':>10}{'kB a step':>12}"
    )
    for workers in asked.workers.split(","):
        print(measure(int(workers), asked.seconds), flush=True)
    print(f"\n{'':>8}{'':>9}{'us an input':^24}{'snapshot':>12}{'restored':>12}")
    print(f"{'workers':>8}{'servers':>9}{'journal':>12}{'without':>12}{'kB':>12}{'in ms':>12}")
    for workers in asked.workers.split(","):
        print(measure_journal(int(workers), asked.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
