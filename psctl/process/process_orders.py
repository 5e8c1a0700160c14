"""What one process of a job is told when it starts: handed over by its agent in memory (sealed_memory.py)."""

from __future__ import annotations

import msgspec

from psctl.errors import UsageError
from psctl.orders import JobOrder
from psctl.process import sealed_memory
from psctl.types import Address, Member


class ProcessOrders(msgspec.Struct, frozen=True):
    """All that a worker, server or coordinator needs to take part in its job."""

    job: str
    member: Member
    world: int  # number of workers
    host: str  # name of its host in the cluster file
    local_rank: int  # among the processes of its role on its host
    coordinator: Address
    bind: str  # numeric address that its listeners bind
    ports: tuple[int, int] | None  # inclusive range that its listeners keep to
    authority: str  # PEM of the job's certificate authority
    certificate: str  # PEM
    key: str  # PEM
    preauth_secret: str  # the job's, proven before TLS; hex
    congestion: str  # auto | reno | cubic | bbr
    error_file: str  # where a worker writes its exception, for its agent to read
    segments: int | None  # descriptor of its end of the pair on which its agent makes shared memory
    stacks: int | None = None  # descriptor to which it writes its stacks when its agent asks (stack_dump.py)
    folder: str = ""  # where the job's own folder lies on this host
    secrets: tuple[str, ...] = ()  # values that its account of a failure must not show


def read_orders() -> ProcessOrders | None:
    """Return this process's orders; None when psctl did not start it.

    Raises:
        UsageError: it was started by a process of a job, whose orders are its own; the script's fault.
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
    """What the coordinator is told by the head's agent; it makes its own certificate with the authority's key."""

    order: JobOrder
    authority: str  # PEM
    authority_key: str  # PEM; nobody else has it
    preauth_secret: str  # the job's, proven before TLS; hex
    store: Address | None  # where other hosts' agents dial to reach torch's store; None: there are no others
    job_dir: str
    workdir: str
    grace: float  # seconds between TERM and KILL
    report: int  # descriptor to which it writes its own address as one JSON line
    error_file: str
