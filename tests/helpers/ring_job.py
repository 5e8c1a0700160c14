"""The state machine of a job of three workers that sum round a ring, step by step."""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state.instructions import Instruction, PlanMade
from psctl.job.training_messages import Heartbeat, MemberReady, Prepare, WorkerListens
from psctl.orders import JobOrder
from psctl.types import Address, Member
from tests.helpers.driven_job import LAYOUT, ORDER, PLAN, DrivenJob
from tests.helpers.orders import make_hosts

W = [Member("worker", rank) for rank in range(3)]
RING = replace(ORDER, hosts=make_hosts(1, 1, 1, free=1), restarts=9, on_worker_loss="wait", stall_timeout=60.0)


class RingJob(DrivenJob):
    """Three hosts, each with a worker of a ring."""

    def agent_of(self, member: Member) -> Member:
        return Member("agent", self.machine.job.ranks[member].host)

    def listens_again(self, *workers: Member, epoch: int) -> list[Instruction]:
        """These workers listen for each other."""
        new: list[Instruction] = []
        for worker in workers:
            at = Address(f"10.0.0.{worker.rank}", 4000)
            new += self.receive(worker, WorkerListens(at, bytes(16), epoch))
        return new


def training(
    order: JobOrder = RING, *, shares: bool = True, update: str = "worker", **prepared: bool
) -> RingJob:  # fmt: skip
    job = RingJob(order)
    job.register()
    for worker in W:
        job.joins(worker)
        job.receive(worker, Prepare(LAYOUT, (), **prepared))
    job.handle(PlanMade("ring", update, [], replace(PLAN, chosen="ring")))
    job.listens_again(*W, epoch=0)
    for worker in W:
        job.receive(worker, MemberReady())
        job.receive(worker, Heartbeat(1, "compute", shares))
    assert job.machine.job.training
    return job
