"""The orders of one process of a job, which its agent passes to it in memory at its start (sealed_memory.py)."""

from __future__ import annotations

import msgspec

from psctl.errors import UsageError
from psctl.job.leadership_messages import Configuration
from psctl.orders import ExportOrder, JobOrder, ReaderOrder
from psctl.process import sealed_memory
from psctl.types import Address, Member


class ProcessOrders(msgspec.Struct, frozen=True):
    """The orders of a worker, server or reader."""

    job: str
    member: Member
    world: int  # number of workers
    host: str  # name of its host in the cluster file
    local_rank: int  # among the processes of its role on its host
    coordinator: Address
    bind: str  # numeric address of its listeners
    ports: tuple[int, int] | None  # inclusive range of its listeners' ports
    authority: str  # PEM of the job's certificate authority
    certificate: str  # PEM
    key: str  # PEM
    preauth_secret: str  # the job's, proven before TLS; hex
    congestion: str  # auto | reno | cubic | bbr
    error_file: str  # where a worker writes its exception, for its agent to read
    sealed: bool  # whether data connections are encrypted
    segments: int | None  # descriptor of the socket on which it requests shared memory from its agent
    stacks: int | None = None  # descriptor to which it writes its stacks at a signal (stack_dump.py)
    spans: int | None = None  # descriptor of the memory for the times of steps (step_ring.py)
    profile: str = ""  # where a worker writes the profile of some steps
    folder: str = ""  # the job's own folder on this host
    secrets: tuple[str, ...] = ()  # values that are masked in the report of a failure
    leader_dir: str | None = None  # folder with the leader's file; None: the coordinator stays where it is
    reader: ReaderOrder | None = None  # of a reader


def read_orders() -> ProcessOrders | None:
    """Return this process's orders; None when psctl did not start it.

    Raises:
        UsageError: a process of a job started it, and the orders are that process's; the script's fault.
    """
    try:
        data = sealed_memory.read()
    except ProcessLookupError as error:
        raise UsageError(
            "psctl.init() was called in a process that a worker started: only the worker itself has a rank",
            "call psctl.init() in the script that psctl train starts, or name this one there as `script:`",
        ) from error
    return msgspec.json.decode(data, type=ProcessOrders) if data is not None else None


class CoordinatorOrders(msgspec.Struct, frozen=True):
    """The orders of the coordinator, which makes its own certificate with the authority's key."""

    order: JobOrder
    authority: str  # PEM
    authority_key: str  # PEM; no other process has it
    preauth_secret: str  # the job's, proven before TLS; hex
    store: Address | None  # address of torch's store for other hosts' agents; None: there are no other hosts
    job_dir: str
    workdir: str
    grace: float  # seconds between TERM and KILL
    report: int  # descriptor to which it writes its own address as one JSON line
    error_file: str
    port: int | None = None  # where the coordinator listened that was killed, and whose job it continues
    host: int = 0  # on which it runs
    committed: Configuration = Configuration()  # with which it leads (coordinator/replication.py)
    newest: Configuration = Configuration()
    is_successor: bool = False  # a coordinator on this host was killed


class ExporterOrders(msgspec.Struct, frozen=True):
    """The orders of the exporter of metrics."""

    job: str
    host: str  # the name of the head
    folder: str  # the job's, with the event log
    exports: ExportOrder
    parameters: dict[str, str | int]  # of the run, by name
    notices: int  # descriptor to which it writes sentences for the event log, one a line
    error_file: str
    secrets: tuple[str, ...] = ()  # values that are masked in the report of a failure
