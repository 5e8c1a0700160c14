"""`psctl.init()`: joins the job that started this process, or makes a run without a job."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from functools import partial
from pathlib import Path

from psctl.client.dense_client import ParameterClient
from psctl.client.host_aggregation import GroupConnections, HostAggregation
from psctl.client.host_connections import HostConnections
from psctl.client.rack_connections import RackConnections
from psctl.client.server_connections import Dial
from psctl.client.shared_buffers import SharedBuffers, SharedRows
from psctl.clock import SystemClock
from psctl.collectives.rendezvous import Rendezvous
from psctl.errors import UsageError
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import ServerUnreachable
from psctl.job.training_messages import Decision
from psctl.kv.store_connections import LocalServer, RemoteServers, StoreServers
from psctl.permits import Permits
from psctl.process.certificate_renewal import CertificateRenewer
from psctl.process.coordinator_connection import CoordinatorConnection
from psctl.process.leader_file import CoordinatorAddress
from psctl.process.process_orders import ProcessOrders, read_orders
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.process.step_ring import StepRecorder, StepRing
from psctl.ps.permits import PARAMETERS, RACK, TABLES
from psctl.ps.shards import sizes
from psctl.sync.gradient_trace import from_environment
from psctl.transport.connect import Acceptor, Allow, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import AnyHandler, PeerConnection
from psctl.transport.shared_memory import inherited
from psctl.types import Member
from psctl.worker import coordinator_session as sessions
from psctl.worker.coordinator_session import CoordinatorSession
from psctl.worker.run import Run
from psctl.worker.standalone import ProgressLines, StandaloneSession, torchrun_rank

DIAL_SECONDS = 20.0
"""Seconds to reach the coordinator or a server."""

QUERY_TIMEOUT = 60.0
"""Seconds that a server may leave a query unanswered."""

_made: list[tuple[str, Run]] = []
"""This process's run and the line that made it, such as "train.py:12"; a process has one run."""


def init() -> Run:
    """Join the job that started this process, and return its run.

    Under `psctl train` it joins the job that started it. Under torchrun it synchronises with the engine's all-reduce
    (strategy `native`). Alone (`python train.py`) it is a world of one. The script is the same.

    Call it once, at the top, before the model is built: it seeds python's, numpy's and torch's random numbers, equally
    on every rank. When the script ends, what is due is saved and reported by itself.

    Raises:
        UsageError: this process has a run already; the message has the place where it was made.
        ConnectionFailed: the job's coordinator cannot be reached; not the script's fault.
    """
    if _made:
        raise UsageError(
            f"psctl.init() was called already, at {_made[0][0]}: a process has one run",
            "pass that run to the code that needs it",
        )
    caller = sys._getframe(1)
    return join(f"{caller.f_code.co_filename}:{caller.f_lineno}")


def current_run() -> Run | None:
    """Return this process's run; None before there is one."""
    return _made[0][1] if _made else None


def join(line: str, *, seeded: bool = True) -> Run:
    """Make this process's run; see `init`.

    Args:
        line: the line of the script that asks for it.
        seeded: seed the script's random numbers.
    """
    orders = read_orders()
    if orders is not None and orders.reader is not None:
        raise UsageError(
            f"psctl.init() in group {orders.reader.group}, which reads the servers and does not train",
            "call psctl.init_reader() there",
        )
    if orders is not None:
        run = join_job(orders, Path(os.environ[ENVIRONMENT]).parent, seeded=seeded)
    else:
        ranks = torchrun_rank()
        run = make_standalone_run(*ranks, "native") if ranks is not None else make_standalone_run(0, 1, "alone")
    _made.append((line, run))
    sessions.set_step_reached(run.step_reached)
    atexit.register(_at_exit, run, orders.error_file if orders is not None else "")
    return run


def make_standalone_run(rank: int, world: int, strategy: str) -> Run:
    """Return a run without a job."""
    clock = SystemClock()
    lines = ProgressLines(clock=clock) if rank == 0 else None
    links = LocalServer if strategy == "alone" else _no_store
    return Run(
        StandaloneSession(rank, world, strategy),
        _no_servers,
        clock,
        links=links,
        trace=from_environment(rank),
        lines=lines,
    )


def join_job(orders: ProcessOrders, folder: Path, *, seeded: bool = True) -> Run:
    """Return the run of a worker that psctl started.

    Args:
        orders: of this process.
        folder: of the orders; readable by this user only.
        seeded: seed the script's random numbers.
    """
    segments = inherited(orders.member, orders.segments)
    credentials = Credentials(
        job=orders.job, member=orders.member, authority=orders.authority,
        certificate=orders.certificate, key=orders.key, preauth_secret=orders.preauth_secret,
    )  # fmt: skip
    rendezvous = partial(Rendezvous, orders, credentials, segments, folder)
    session = CoordinatorSession(
        orders.member,
        connect=lambda schedule, hosts, exchange, memory: rendezvous(hosts).make(schedule, exchange, memory),
        connect_ranks=lambda schedule, hosts, exchange, memory: rendezvous(hosts, purpose="ranks").make(
            schedule, exchange, memory
        ),
    )
    handler = CertificateRenewer(credentials, session, lambda _: None)  # no line: the output belongs to the script
    clock = SystemClock()
    trace = from_environment(orders.member.rank)

    def dialler(permits: Permits) -> Dial:
        return lambda member, address, handler: dial(
            address, credentials, member, permits, handler, DIAL_SECONDS, orders.congestion, sealed=orders.sealed
        )

    address = CoordinatorAddress(orders.coordinator, Path(orders.leader_dir) if orders.leader_dir else None)
    session.use_connection(
        CoordinatorConnection(handler, partial(_dial_coordinator, orders, credentials, address), address=address)
    )

    def connect(decision: Decision) -> ParameterClient:
        sharing = SharedBuffers(segments)
        connections = partial(_group_connections, decision, orders, credentials, folder, dialler(RACK))
        together = any(orders.member.rank in group for group in decision.hosts)
        return ParameterClient(
            orders.member, orders.world, decision, dialler(PARAMETERS), clock, QUERY_TIMEOUT,
            (lambda shard, clock: trace("push-bytes-left", shard=shard, clock=clock)) if trace is not None else None,
            session.send, sharing, HostAggregation(orders.member, connections, sharing) if together else None,
        )  # fmt: skip

    def links() -> StoreServers:
        servers = RemoteServers(
            session.tables(),
            dialler(TABLES),
            lambda at, error: session.send(ServerUnreachable(at.rank, at.incarnation, error.message)),
            SharedRows(segments),
        )
        session.follow_tables(servers.assign)
        return servers

    return Run(
        session, connect, clock, links=links, trace=trace, folder=orders.folder,
        spans=StepRecorder(StepRing(orders.spans)) if orders.spans is not None else None, profile=orders.profile,
        seeded=seeded,
    )  # fmt: skip


def _group_connections(
    decision: Decision, orders: ProcessOrders, credentials: Credentials, folder: Path, dial: Dial,
    handler: HostAggregation,
) -> GroupConnections:  # fmt: skip
    """Return a worker's connections to the others with whom its gradients are summed."""
    if not decision.racks:
        return HostConnections(orders.member, folder, handler)

    def listen(handler: AnyHandler, allow: Allow) -> Acceptor:
        return Acceptor(
            orders.bind, orders.ports, credentials, RACK, handler, allow, orders.congestion, sealed=orders.sealed
        )

    return RackConnections(orders.member, dial, listen, max(sizes(decision.shards), default=0), handler)


def _dial_coordinator(
    orders: ProcessOrders, credentials: Credentials, address: CoordinatorAddress, handler: AnyHandler
) -> PeerConnection:
    expected = Member("coordinator", 0)
    return dial(address.get(), credentials, expected, COORDINATION, handler, DIAL_SECONDS, orders.congestion)


def _no_servers(decision: Decision) -> ParameterClient:
    raise AssertionError("no strategy with servers is decided without a job")


def _no_store() -> StoreServers:
    raise UsageError(
        "run.store() under torchrun, which has no servers to hold a store",
        "start the script with psctl train, or alone (python train.py)",
    )


def _at_exit(run: Run, error_file: str) -> None:
    """Finish the run as the script ended. If that fails, end the process with status 1."""
    failed = _find_failure()
    if not failed and error_file and Path(error_file).exists():
        failed = "the script ended with an error"
    try:
        run.finish(failed)
    except BaseException:  # noqa: BLE001  at exit Python would print it and end with status 0
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _find_failure() -> str:
    """Return the name of the exception that ended the script, as the interpreter recorded it, or ""."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return f"the script ended with {type(error).__name__}" if error is not None else ""
