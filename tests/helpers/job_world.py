"""A whole job in one process: runs in threads, real sessions, clients and servers, and a coordinator stood in for here.

The coordinator does by the shortest way what the messages promise: it compares, decides, relays, keeps checkpoints in
memory, serves them, and finds one common step to cut at.
"""

from __future__ import annotations

import queue
import threading
import time
from functools import cache

import msgspec

from psctl.client.dense_client import ParameterClient
from psctl.clock import SystemClock
from psctl.job.assignment import assign
from psctl.job.checkpoint_messages import (
    CheckpointSaved,
    CutAt,
    CutPosition,
    LoadEnd,
    LoadPart,
    LoadWanted,
    ProposeCut,
    SaveBegin,
    SaveEnd,
    SavePart,
)
from psctl.job.membership_messages import (
    CountUntil,
    ExamplesShared,
    LostWorkerClocks,
    Members,
    NextClock,
    NextClockWanted,
    WorkerGone,
)
from psctl.job.training_messages import (
    Decision,
    Go,
    Heartbeat,
    Join,
    Leave,
    MemberReady,
    Prepare,
    Resume,
    ScriptFinished,
    StartBegin,
    StartEnd,
    StartPart,
    Welcome,
    WorkerReport,
)
from psctl.ps.permits import PARAMETERS
from psctl.ps.shards import cut, sizes
from psctl.server.main import Server
from psctl.transport.credentials import Credentials
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Member
from psctl.worker.coordinator_session import CoordinatorSession
from psctl.worker.run import Run
from tests.helpers.assignments import first_assignment
from tests.helpers.memory_checkpoints import MemoryCheckpoint, read_slice
from tests.helpers.memory_stream import MemoryNetwork

WAIT = 20.0
KNOCK = new_secret()


@cache
def authority():
    return make_authority("job-1", time.time())


@cache
def credentials(member: Member) -> Credentials:
    pair = issue(authority(), "job-1", member, time.time())
    return Credentials("job-1", member, authority().certificate_pem, pair.certificate_pem, pair.key_pem, KNOCK)


class Killed(BaseException):
    """Raised by a script where its process is to be killed."""


class JobClock(SystemClock):
    """The system's clock; a thousand times as fast once the job has failed, so that every wait for a server ends."""

    def __init__(self) -> None:
        self._failed: float | None = None

    def fail(self) -> None:
        """Go faster from now on."""
        self._failed = self._failed or super().now()

    def now(self) -> float:
        now = super().now()
        return now if self._failed is None else now + 1000 * (now - self._failed)


class Wire:
    """Brings messages to one handler on a thread of its own, as a network would."""

    def __init__(self, handler) -> None:
        self.handler = handler
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def bring(self, message, payload=None) -> None:
        self._queue.put((message, payload))

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(WAIT)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            message, payload = item
            if payload is not None:
                place = self.handler.receive_buffer_for(None, message, len(payload))
                if place is not None:
                    place[:] = payload
            self.handler.on_message(None, message, payload)


class Link:
    """One member's connection to the coordinator."""

    def __init__(self, job: Job, member: Member) -> None:
        self.job, self.member = job, member

    def send(self, message, payload=None, *, urgent=False) -> None:
        self.job.received(self.member, message, bytes(payload) if payload is not None else None)

    def flush(self, timeout=None) -> None:
        pass

    def close(self, reason="") -> None:
        pass

    def join(self, timeout=None) -> bool:
        return True


class Job:
    """A job; `run(script)` calls `script(run)` for every worker in a thread and returns what each returned.

    Args:
        resume: a checkpoint of another job.
        cut_at: propose a common step when rank 0 reports this step; with `stop`.
        host: makes memory that all processes share; None: all bytes are sent.
    """

    def __init__(
        self, workers=2, servers=1, strategy="ps", update="auto", every=0, seed=0, resume=None, target=256, traces=None,
        staleness=0, period=1, elastic=False, host=None, report_seconds=0.05,
    ) -> None:  # fmt: skip
        self.host = host
        self.workers, self.count, self.strategy, self.update = workers, servers, strategy, update
        self.every, self.seed, self.target, self.traces, self.staleness = every, seed, target, traces or {}, staleness
        self.period, self.elastic, self.report_seconds = period, elastic, report_seconds
        self.checkpoint: MemoryCheckpoint | None = resume
        self.network, self._clock = MemoryNetwork(), JobClock()
        self.saved: dict[int, MemoryCheckpoint] = {}
        self.reports: list[tuple[int, WorkerReport]] = []
        self.reported: dict[int, tuple[int, dict[str, float]]] = {}  # step saved -> what rank 0 had reported before
        self.finished: dict[int, int] = {}
        self.decision: Decision | None = None
        self._wires: dict[Member, Wire] = {}
        self._lock = threading.RLock()
        self._layouts: dict[int, Prepare] = {}
        self._ready: set[int] = set()
        self._positions: dict[int, dict[int, int]] = {}
        self._cuts: dict[int, tuple[bool, bool]] = {}
        self._servers, self._acceptors, self._threads = [], [], []
        self.members = [Member("worker", rank) for rank in range(workers)]
        self.held: dict[Member, list[LostWorkerClocks]] = {}
        self.cuts: list[int] = []
        self.lost: dict[int, int] = {}  # rank -> its first clock that does not count
        self._drawn: dict[int, int] = {}
        self._shared: list[ExamplesShared] = []
        self._joining: dict[int, Resume] = {}
        self._clients: dict[Member, ParameterClient] = {}
        self._changed = threading.Condition(self._lock)

    # ---- what tests call ----

    def run(self, script):
        results, errors = [None] * self.workers, []

        def work(rank: int) -> None:
            member = self.members[rank]
            session = self._seat(member, errors)
            try:
                run = Run(session, self._connector(member), SystemClock(), trace=self.traces.get(rank))
                try:
                    results[rank] = script(run)
                except Killed:
                    run._heartbeat.end()
                    self._die(member)
                    if rank in self.lost:
                        return
                    work(rank)
                    return
                except SystemExit as end:
                    results[rank] = "stopped" if end.code == 0 else f"exit {end.code}"
                except BaseException:
                    run.finish("the script failed")
                    raise
                run.finish()
            except BaseException as error:  # noqa: BLE001  told by the test's own thread
                errors.append((rank, error))
                self.fail(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(6 * WAIT)
            assert not thread.is_alive(), f"a worker hangs; errors so far: {errors}"
        self._end()
        if errors:
            raise errors[0][1]
        return results

    def _seat(self, member: Member, errors) -> CoordinatorSession:
        session = CoordinatorSession(member, leave=errors.append)
        self._wires[member] = Wire(session)
        session.on_connected(Link(self, member))
        return session

    def _die(self, member: Member) -> None:
        """End a worker as kill -9 does, find the clock to cut at; its next incarnation joins there, or nobody does."""
        self._clients[member]._servers.stop_dialling()
        for dialler, link in list(self.network._links):
            if dialler == member:
                link.kill()
        for server in self._servers:
            self._bring(server.me, WorkerGone(member.rank, member.incarnation))
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.held.get(member, [])) == len(self._servers), WAIT)
            clocks = [clock for held in self.held[member] for clock in held.clocks.values()]
            separate = [clock for held in self.held[member] for clock in held.separate_clocks.values()]
            versions = [version for held in self.held[member] for version in held.versions.values()]
        cut = min([*clocks, *separate])
        if max(versions) > cut + 1:
            cut = min(clocks)
        if member.rank == 0 or self.staleness is None:  # who joins needs its state of the clock after the cut
            cut = min(cut, max(held.rank_state_clock for held in self.held[member]) - 1)
        assert self.staleness != 0 or max(versions) <= cut + 1, "no shard has applied what is dropped"
        for server in self._servers:
            self._bring(server.me, CountUntil(member.rank, member.incarnation, cut))
        self.cuts.append(cut)
        if self.elastic and member.rank != 0:
            self._lose(member.rank, cut + 1)
            return
        self._joining[member.rank] = Resume("", cut + 1, {}, [])
        self.members[member.rank] = Member("worker", member.rank, member.incarnation + 1)

    def _lose(self, rank: int, clock: int) -> None:
        """Go on without a worker, whose clocks from this one on do not count."""
        with self._changed:
            self.lost[rank] = clock
            self._drawn, ticket = {}, len(self.lost)
            left = [one for one in range(self.workers) if one not in self.lost]
            asked = [one for one in left if one not in self.finished]
            for one in asked:
                self._bring(self.members[one], NextClockWanted(ticket))
            assert self._changed.wait_for(lambda: len(self._drawn) == len(asked), WAIT)
            ranks = [one for one in range(self.workers) if self.lost.get(one, clock + 1) > clock]
            for server in self._servers:
                self._bring(server.me, Members(clock, ranks))
            before = self._shared[-1].clock if self._shared else 0
            shared = ExamplesShared(ticket, max([clock, before, *self._drawn.values()]), left, {rank: clock})
            self._shared.append(shared)
            for one in left:
                self._bring(self.members[one], shared)

    def fail(self, error) -> None:
        """Let the other workers go, as a coordinator does when one fails."""
        self._clock.fail()
        for server in self._servers:
            server.on_message(None, Leave("a worker failed"), None)

    def propose(self, ticket=1, save=True, stop=False) -> None:
        with self._lock:
            self._cuts[ticket] = (save, stop)
            self._positions[ticket] = {}
        self._bring_all(ProposeCut(ticket))

    def newest_state_of(self, rank: int) -> int:
        """Return the newest clock that a server has the state of worker `rank` at; below zero: of none."""
        return max(server.state._rank_states.newest_clock(rank) for server in self._servers)

    def metrics(self) -> dict[int, dict[str, float]]:
        """Example-weighted means by step and name."""
        sums: dict[tuple[int, str], list[float]] = {}
        for _, report in self.reports:
            for one in report.steps:
                for name, value in one.metrics.items():
                    pair = sums.setdefault((one.step, name), [0.0, 0.0])
                    pair[0] += value * one.weight
                    pair[1] += one.weight
        found: dict[int, dict[str, float]] = {}
        for (step, name), (total, weight) in sums.items():
            found.setdefault(step, {})[name] = total / weight
        return found

    def _reported_of(self, step: int) -> tuple[int, dict[str, float]]:
        mine = [report for rank, report in self.reports if rank == 0]
        numbers = [each.metrics for report in mine for each in report.steps if each.step == step]
        return max((report.rested for report in mine), default=0), {k: v for found in numbers for k, v in found.items()}

    # ---- the coordinator ----

    def received(self, member: Member, message, payload) -> None:
        with self._lock:
            if member.role == "worker":
                self._from_worker(member.rank, member, message, payload)
            else:
                self._from_any(member, message, payload)

    def _from_worker(self, rank, member, message, payload) -> None:
        match message:
            case Join():
                resume = self._joining.get(rank) or (self.checkpoint.resume("job-1") if self.checkpoint else None)
                self._bring(member, Welcome(self.workers, self.seed, self.every, self.report_seconds, resume))
            case Prepare() if rank in self._joining:
                self._bring(member, msgspec.structs.replace(self.decision, resume=self._joining[rank]))
                for shared in self._shared:
                    self._bring(member, shared)
            case NextClock():
                self._drawn[rank] = message.clock
                self._changed.notify_all()
            case MemberReady() if rank in self._joining:
                self._bring(member, Go())
            case Prepare():
                self._layouts[rank] = message
                if len(self._layouts) == self.workers:
                    assert all(one == message for one in self._layouts.values()), "the ranks differ"
                    self._decide()
            case MemberReady():
                self._ready.add(rank)
                if len(self._ready) == self.workers:
                    self._bring_all(Go())
            case StartBegin() | StartPart() | StartEnd():
                for other in range(1, self.workers):
                    self._bring(self.members[other], message, payload)
            case WorkerReport():
                self.reports.append((rank, message))
            case CutPosition():
                positions = self._positions[message.ticket]
                positions[rank] = message.step
                if len(positions) == self.workers:
                    save, stop = self._cuts[message.ticket]
                    self._bring_all(CutAt(message.ticket, max(positions.values()) + 1, save, stop))
            case ScriptFinished():
                self.finished[rank] = message.step
            case Heartbeat():
                pass
            case _:
                self._from_any(member, message, payload)

    def _from_any(self, member, message, payload) -> None:
        match message:
            case LostWorkerClocks():
                self.held.setdefault(Member("worker", message.rank, message.incarnation), []).append(message)
                self._changed.notify_all()
            case SaveBegin():
                self.saved.setdefault(message.step, MemoryCheckpoint(message.step)).begin(member, message)
                if message.state is not None:
                    self.reported[message.step] = self._reported_of(message.step)
            case SavePart():
                self.saved[message.step].write(member, message, payload)
            case SaveEnd():
                saved = self.saved[message.step]
                saved.ended.add(member)
                on_servers = self.decision.strategy == "ps" and self.decision.update == "server"
                apart = self.period > 1 or self._layouts[0].outer
                if len(saved.ended) == (self.workers if apart else 1) + (self.count if on_servers else 0):
                    self._bring_all(CheckpointSaved(message.step))
            case LoadWanted():
                for index, one in enumerate(message.slices):
                    data = read_slice(self.checkpoint.tensors, one)
                    for offset in range(0, len(data), 1000):
                        self._bring(
                            member,
                            LoadPart(message.ticket, index, offset),
                            data[offset : offset + 1000],
                        )
                self._bring(member, LoadEnd(message.ticket))

    def _decide(self) -> None:
        layout = self._layouts[0].layout
        fit = layout.optimizer and self.period == 1
        update = self.update if self.update != "auto" else "server" if fit else "worker"
        resume = self.checkpoint.resume("job-1") if self.checkpoint else None
        if self.strategy != "ps":
            self.decision = Decision(self.strategy, "worker", layout, [], resume=resume, period=self.period)
        else:
            shards = cut(layout, self.count, self.target)
            addresses = [self._add_server(rank) for rank in range(self.count)]
            owners = [chain[0] for chain in assign(sizes(shards), dict.fromkeys(range(self.count), 0), replicas=0)]
            first = first_assignment(owners, addresses)
            self.decision = Decision(
                "ps", update, layout, shards, first, resume, staleness=self.staleness, period=self.period,
                elastic=self.elastic,
            )  # fmt: skip
            for server in self._servers:
                self._bring(server.me, Welcome(self.workers, self.seed, 0, 1.0))
                self._bring(server.me, self.decision)
        self._bring_all(self.decision)

    def _add_server(self, rank: int):
        me = Member("server", rank)

        def dial(member, address, handler):
            return self.network.dial(address, credentials(me), member, PARAMETERS, handler)

        server = Server(me, dial, self._sharing(me))
        acceptor = self.network.acceptor(credentials(me), PARAMETERS, server.dense, server.dense.allow)
        self._wires[me] = Wire(server)
        thread = threading.Thread(target=server.run, args=(Link(self, me), acceptor.address), daemon=True)
        thread.start()
        self._servers.append(server)
        self._acceptors.append(acceptor)
        self._threads.append(thread)
        return acceptor.address

    def _sharing(self, me: Member):
        return self.host.sharing(me) if self.host is not None else None

    def _connector(self, me: Member):
        def dial(member, address, handler):
            return self.network.dial(address, credentials(me), member, PARAMETERS, handler)

        def connect(decision):
            trace = self.traces.get(me.rank)
            note = trace and (lambda shard, clock: trace("push-bytes-left", shard=shard, clock=clock))
            made = ParameterClient(
                me, self.workers, decision, dial, self._clock, WAIT, note, sharing=self._sharing(me)
            )  # fmt: skip
            self._clients[me] = made
            return made

        return connect

    def _bring(self, member, message, payload=None) -> None:
        wire = self._wires.get(member)
        if wire is not None:  # else it is being started again
            wire.bring(message, payload)

    def _bring_all(self, message) -> None:
        for rank in range(self.workers):
            self._bring(self.members[rank], message)

    def _end(self) -> None:
        for server in self._servers:
            server.on_message(None, Leave("the test is over"), None)
        for thread in self._threads:
            thread.join(WAIT)
        for acceptor in self._acceptors:
            acceptor.close()
        for wire in self._wires.values():
            wire.end()
