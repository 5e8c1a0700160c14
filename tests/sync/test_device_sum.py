"""Vectors on devices that run late, summed on the host over psctl's own data plane: right, whatever comes when."""

from __future__ import annotations

import random

import pytest
import torch

from psctl.collectives.allreduce_backends import ScheduleAllReduce
from psctl.schedule.algorithms import catalog
from psctl.sync.device_copies import CudaCopies
from psctl.sync.device_sum import StagedAllReduce
from tests.helpers.data_planes import DataPlanes
from tests.helpers.device import Device

WORLD = 3


class OnDevice(CudaCopies):
    """The real ones, on the device of the tests."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.cuda)
        self.device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.device.home(tensor) is not None


@pytest.mark.parametrize("name", ["ring", "one-shot", "cpu"])
def test_vectors_on_devices_are_summed_on_the_host(name: str) -> None:
    schedule = catalog.build(name, WORLD)
    sums: list[list[torch.Tensor]] = [[] for _ in range(WORLD)]
    with DataPlanes([0] * WORLD) as cast:

        def rank(me: int) -> None:
            with Device(random.Random(me)) as device:
                played = ScheduleAllReduce(schedule, torch.device("cpu"), cast.planes[me], shared=True)
                summing = StagedAllReduce(played, OnDevice(device))
                flats = [device.own(summing.buffer(size, torch.float32, torch.device("cpu"))) for size in (5, 50_000)]
                for step in range(3):
                    works = []
                    for flat in flats:
                        flat.copy_(device.own(torch.arange(float(len(flat)))) * (me + 1) + step)
                        works.append(summing.put(flat))
                    for work in works:
                        work.wait()
                    sums[me] += [flat.clone() for flat in flats]
                summing.close()
            device.finish()
            assert not device.locked, "the host's memory is let go of"

        assert cast.all(rank) == [None] * WORLD
    for found in sums:
        for at, one in enumerate(found):
            assert torch.equal(one, torch.arange(float(len(one))) * 6 + 3 * (at // 2))
