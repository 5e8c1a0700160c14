"""What one process of a job is told when it starts: a 0600 file written by its agent, read by the process itself."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from psctl.orders import JobOrder
from psctl.words import Address, Member

ENVIRONMENT = "PSCTL_ORDERS"
"""The environment variable that holds the path of the orders' file."""


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
    knock: str  # the job's, shown before TLS; hex
    congestion: str  # auto | reno | cubic | bbr
    error_file: str  # where a worker writes its exception, for its agent to read
    segments: int | None  # descriptor of its end of the pair on which its agent makes shared memory
    folder: str = ""  # where the job's own folder lies on this host


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path` readable by this user only, whole or not at all."""
    part = path.with_name(path.name + ".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    part.rename(path)


def write_orders(path: Path, orders: ProcessOrders) -> None:
    """Write the orders of one process as a 0600 file."""
    write_private(path, msgspec.json.encode(orders))


def read_orders(path: str | None = None) -> ProcessOrders | None:
    """Return this process's orders, from `path` or the file PSCTL_ORDERS names; None when psctl did not start it.

    Raises:
        OSError, msgspec.ValidationError: the file that PSCTL_ORDERS names is missing or damaged; psctl's fault.
    """
    path = path or os.environ.get(ENVIRONMENT)
    return msgspec.json.decode(Path(path).read_bytes(), type=ProcessOrders) if path else None


class CoordinatorOrders(msgspec.Struct, frozen=True):
    """What the coordinator is told by the head's agent; it makes its own certificate with the authority's key."""

    order: JobOrder
    authority: str  # PEM
    authority_key: str  # PEM; nobody else has it
    knock: str  # the job's, shown before TLS; hex
    master: Address  # where torch's store listens, for MASTER_ADDR and MASTER_PORT
    job_dir: str
    workdir: str
    grace: float  # seconds between TERM and KILL
    report: int  # descriptor to which it writes its own address as one JSON line
    error_file: str
