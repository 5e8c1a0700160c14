"""A whole job in one process: workers in threads, with real sessions, clients, servers and the job's state machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from psctl.client.dense_client import ParameterClient
from psctl.clock import SystemClock
from psctl.coordinator.state.instructions import CloseCoordinator, Instruction, SendMessage, Tick
from psctl.errors import ConnectionFailed
from psctl.job.checkpoint_messages import SaveBegin
from psctl.job.membership_messages import ExamplesShared
from psctl.job.process_messages import ScaleAnswer, ScaleWanted, StopWanted
from psctl.job.training_messages import ScriptFinished, WorkerReport
from psctl.types import PLAIN, Compression, Member
from psctl.worker.coordinator_session import CoordinatorSession
from psctl.worker.run import Run
from tests.helpers.memory_checkpoints import MemoryCheckpoint
from tests.helpers.memory_stream import MemoryNetwork
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.threaded_job import WAIT, Host, ThreadedJob

TICK = 0.1


class Killed(BaseException):
    """Raised by a script to kill its own process."""


class JobClock(SystemClock):
    """The system's clock, a thousand times as fast after the job has failed, so that every wait for a server ends."""

    def __init__(self) -> None:
        self._failed: float | None = None

    def fail(self) -> None:
        """Run faster from now on."""
        self._failed = self._failed or super().now()

    def now(self) -> float:
        now = super().now()
        return now if self._failed is None else now + 1000 * (now - self._failed)


class Job(ThreadedJob):
    """A job; `run(script)` calls `script(run)` for every worker in a thread and returns what each returned.

    All processes are on one host.

    Args:
        workers: their number.
        servers: their number, under ps.
        strategy: of the order, like update, seed, staleness, period and report_seconds.
        every: steps between two checkpoints.
        resume: a checkpoint of another job.
        target: bytes of a shard.
        traces: by rank: receives the events of a run.
        elastic: continue without lost workers.
        free: slots for more workers.
        factor_rows: of a worker's batch, where `factors` of the job names layers.
        bucket: bytes of a bucket of collectives; 0: measured.
        compression: of gradients.
        step_in_backward: of a sharded optimizer, or of servers.
        joint_batch_norm: BatchNorm's statistics are of all workers' batches; it needs `planes`.
        planes: makes the data planes of collectives; `kill(member)` ends those of a worker.
        host: makes memory that all processes share; None: all bytes are sent.
    """

    def __init__(
        self, workers: int = 2, servers: int = 1, strategy: str = "ps", update: str = "auto", every: int = 0,
        seed: int = 0, resume: MemoryCheckpoint | None = None, target: int = 256, traces: dict[int, Any] | None = None,
        staleness: int | None = 0, period: int = 1, elastic: bool = False, host: Host | None = None,
        report_seconds: float = 0.05, free: int = 0, planes: Any = None,
        factor_rows: int | None = None, bucket: int | None = None, compression: Compression = PLAIN,
        step_in_backward: bool = False, joint_batch_norm: bool = False,
    ) -> None:  # fmt: skip
        order = make_order(
            make_hosts(workers, free=free), strategy=strategy, update=update, every=every, seed=seed,
            staleness=staleness, period=period, report_seconds=report_seconds, restarts=99, factor_rows=factor_rows,
            bucket=bucket, compression=compression, step_in_backward=step_in_backward,
            joint_batch_norm=joint_batch_norm,
            on_worker_loss="continue" if elastic else "wait",
        )  # fmt: skip
        self.host, self.workers, self.traces, self.planes = host, workers, traces or {}, planes
        self.reports: list[tuple[int, WorkerReport]] = []
        self.reported: dict[int, tuple[int, dict[str, float]]] = {}  # step saved -> what rank 0 had reported before
        self.finished: dict[int, int] = {}
        self.lost: dict[int, int] = {}  # rank -> its first clock that does not count
        self.answers: list[ScaleAnswer] = []
        self.tables: Callable[[Member], Any] | None = None
        """Connects a worker to the servers of tables; None: each worker has tables of its own."""
        self._speed = JobClock()
        self._clients: dict[Member, ParameterClient] = {}
        self._sessions: dict[Member, CoordinatorSession] = {}
        self._results: dict[int, Any] = dict.fromkeys(range(workers))
        self._errors: list[BaseException] = []
        self._dismissed: set[Member] = set()
        self._over = threading.Event()
        super().__init__(order, [0] * servers, target, resume, MemoryNetwork())

    # ---- what tests call ----

    def run(self, script: Callable[[Run], Any]) -> list[Any]:
        self._script = script
        self.begin()
        self.register()
        patience = SystemClock()
        end = patience.now() + 6 * WAIT
        while not self.status:
            if not self._over.wait(TICK):
                self.handle(Tick())
            assert patience.now() < end, f"a worker hangs; errors so far: {self._errors}"
        self.close()
        if self._errors:
            raise self._errors[0]
        return [result for _, result in sorted(self._results.items())]

    def scale(self, workers: int) -> None:
        """Ask for another number of workers."""
        self.receive(Member("agent", 0), ScaleWanted(1, workers, None))

    @property
    def saved(self) -> dict[int, MemoryCheckpoint]:
        """By step: the checkpoints that are committed."""
        return self.disk.whole

    def newest_state_of(self, rank: int) -> int:
        """Return the newest clock that a server has the state of worker `rank` at; below zero: of none."""
        return max(server.state._rank_states.newest_clock(rank) for server in self.servers.values())

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

    # ---- workers ----

    def start_worker(self, member: Member) -> None:
        self.threads[member] = threading.Thread(target=self._work, args=(member,), daemon=True)
        self.threads[member].start()

    def _work(self, member: Member) -> None:
        session = self._sessions[member] = CoordinatorSession(
            member, leave=lambda why: self._leave(member, why),
            connect=self.planes.connector(member) if self.planes else None,
            connect_ranks=self.planes.connector(member, purpose="ranks") if self.planes else None,
        )  # fmt: skip
        session.use_connection(self.connect(member, session))
        try:
            tables = self.tables
            run = Run(
                session, self._connector(member), SystemClock(), trace=self.traces.get(member.rank),
                links=(lambda: tables(member)) if tables is not None else None,
            )  # fmt: skip
            try:
                self._results[member.rank] = self._script(run)
            except Killed:
                run._heartbeat.end()
                self._die(member)
                return
            except SystemExit as end:
                self._results[member.rank] = "stopped" if end.code == 0 else f"exit {end.code}"
            except BaseException:
                run.finish("the script failed")
                raise
            run.finish()
        except BaseException as error:  # noqa: BLE001  raised by the test's own thread
            del self._sessions[member]
            if member in self._dismissed:
                self._results[member.rank] = "ended"
                self.killed(member)
                return
            self._errors.append(error)
            self.fail(member, error)
            return
        del self._sessions[member]
        self.exits(member)

    def _leave(self, member: Member, why: BaseException) -> None:
        if member not in self._dismissed and self.machine.job.restart is None:  # else all processes are ended
            self._errors.append(why)

    def _die(self, member: Member) -> None:
        """End a worker as kill -9 does."""
        del self._sessions[member]
        if member in self._clients:
            self._clients[member]._servers.stop_dialling()
        self.network.kill(member)
        if self.planes is not None:
            self.planes.kill(member)
        self.killed(member)

    def fail(self, member: Member, error: BaseException) -> None:
        """End the job at once because a worker has failed."""
        self._speed.fail()
        self.exits(member, 1, repr(error))
        self.receive(self.agent_of(member), StopWanted(save=False, force=True, by="the test"))

    def end_processes(self, members: Sequence[Member] | None) -> None:
        super().end_processes(members)
        for member, session in list(self._sessions.items()):
            if members is None or member in members:
                if self.machine.job.ranks[member].leaving:  # a worker that the coordinator does not need fails nothing
                    self._dismissed.add(member)
                session.on_connection_lost(None, ConnectionFailed("the process is ended"))

    def _connector(self, me: Member) -> Any:
        def connect(decision: Any) -> ParameterClient:
            trace = self.traces.get(me.rank)
            note = trace and (lambda shard, clock: trace("push-bytes-left", shard=shard, clock=clock))
            self._clients[me] = ParameterClient(
                me, self.workers, decision, self.dialler(me), self._speed, WAIT, note, sharing=self.sharing(me)
            )
            return self._clients[me]

        return connect

    def sharing(self, member: Member) -> Any:
        return self.host.sharing(member) if self.host is not None else None

    # ---- recorded messages ----

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        rank = peer.member.rank
        match message:
            case WorkerReport():
                self.reports.append((rank, message))
            case ScriptFinished():
                self.finished[rank] = message.step
            case SaveBegin() if message.state is not None:
                self.reported[message.step] = self._reported_of(message.step)
        super().on_message(peer, message, payload)

    def _reported_of(self, step: int) -> tuple[int, dict[str, float]]:
        mine = [report for rank, report in self.reports if rank == 0]
        numbers = [each.metrics for report in mine for each in report.steps if each.step == step]
        return max((report.rested for report in mine), default=0), {k: v for found in numbers for k, v in found.items()}

    def carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendMessage) and isinstance(instruction.message, ExamplesShared):
            self.lost.update(instruction.message.lost)
        if isinstance(instruction, SendMessage) and isinstance(instruction.message, ScaleAnswer):
            self.answers.append(instruction.message)
        super().carry_out(instruction)
        if isinstance(instruction, CloseCoordinator):
            self._over.set()
