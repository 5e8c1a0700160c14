"""Orders of jobs for tests."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from psctl.orders import CheckpointOrder, HostOrder, JobOrder

SAVE = CheckpointOrder(to=None, every_steps=0, every_seconds=0.0, keep=3, keep_best=None, on_stop=False, copies=0)

_HOST = HostOrder(name="", address="", interface="eth0", cores=4, gpus=0, workers=1, may_serve=True)

_ORDER = JobOrder(
    name="job-1", argv=["train.py"], hosts=[], servers=1, strategy="ps", update="server", seed=0, size=None,
    start_timeout=120.0, stall_timeout=300.0, total_timeout=None, report_seconds=1.0, ports=None, checkpoint=SAVE,
    resume=None, resume_id=None, code_hash="c", job_file="", environment={}, congestion="auto",
)  # fmt: skip


def make_hosts(*workers: int, free: int = 0, **changes: Any) -> list[HostOrder]:
    """Return hosts h0, h1 ... with these numbers of workers, each with so many free slots."""
    return [
        replace(
            _HOST,
            **{
                "name": f"h{index}",
                "address": f"10.0.0.{index + 1}",
                "workers": count,
                "slots": count + free,
                **changes,
            },
        )
        for index, count in enumerate(workers)
    ]


def make_order(hosts: list[HostOrder], *, every: int = 0, **changes: Any) -> JobOrder:
    """Return a job on these hosts: under ps with the optimizer on one server, unless `changes` say otherwise.

    Args:
        hosts: the first is the head.
        every: steps between two checkpoints; 0: none.
        changes: by name of the order's field.
    """
    return replace(_ORDER, **{"hosts": hosts, "checkpoint": replace(SAVE, every_steps=every), **changes})
