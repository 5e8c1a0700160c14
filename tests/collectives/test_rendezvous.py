"""Workers connect to those that their schedule has messages for, as the coordinator told: who, where, which start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from psctl.collectives import rendezvous
from psctl.collectives.data_plane import DataPlane
from psctl.collectives.player import SchedulePlayer
from psctl.collectives.rendezvous import Rendezvous, partners
from psctl.errors import PsctlError
from psctl.job.training_messages import WorkerAt
from psctl.schedule.algorithms import catalog
from psctl.transport.shared_memory import SegmentClient
from psctl.types import Address, Member
from tests.helpers.credentials import credentials
from tests.helpers.dying_planes import process_orders


class Round:
    """All workers at once; the coordinator is played here.

    Args:
        hosts: of each worker.
        incarnations: those that the coordinator reports.
    """

    def __init__(self, folder: Path, hosts: list[int], incarnations: list[int]) -> None:
        self.folder, self.hosts, self.incarnations = folder, hosts, incarnations
        self.told: dict[int, tuple[Address | None, bytes]] = {}
        self.changed = threading.Condition()
        self.found: list[DataPlane | BaseException] = [RuntimeError()] * len(hosts)

    def ask(self, rank: int, address: Address | None, secret: bytes) -> list[WorkerAt]:
        with self.changed:
            self.told[rank] = address, secret
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.told) == len(self.hosts), 20)
            return [WorkerAt(each, self.incarnations[each], *self.told[each]) for each in range(len(self.hosts))]

    def run(self) -> None:
        for rank in range(len(self.hosts)):
            credentials(Member("worker", rank))  # made once, before threads ask for them

        def one(rank: int) -> None:
            me = Member("worker", rank)
            folder = self.folder / str(self.hosts[rank])
            folder.mkdir(exist_ok=True)
            meeting = Rendezvous(process_orders(me), credentials(me), SegmentClient(me, None), folder, self.hosts)
            try:
                self.found[rank] = meeting.make(
                    catalog.build("ring", len(self.hosts)), lambda *given: self.ask(rank, *given)
                )
            except PsctlError as error:
                self.found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


def test_workers_of_one_host_and_of_several_connect_and_sum(tmp_path: Path) -> None:
    meeting = Round(tmp_path, [0, 1, 0], [0, 0, 0])
    meeting.run()
    planes: list[Any] = meeting.found
    assert all(isinstance(each, DataPlane) for each in planes), planes
    assert [plane.reads_in_place(2) for plane in planes[:2]] == [True, False]
    assert not [each for each in tmp_path.rglob("*") if not each.is_dir()], "no socket is left in a folder"
    vectors = [torch.full((100_000,), float(rank)) for rank in range(3)]
    players = [SchedulePlayer(catalog.build("ring", 3), rank, plane) for rank, plane in enumerate(planes)]
    threads = [threading.Thread(target=player.play, args=(vectors[rank],)) for rank, player in enumerate(players)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(torch.equal(vector, torch.full((100_000,), 3.0)) for vector in vectors)
    closing = [threading.Thread(target=plane.close) for plane in planes]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(20)


def test_another_start_of_a_worker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT", 0.5)
    meeting = Round(tmp_path, [0, 1], [0, 1])
    meeting.run()
    assert all(isinstance(each, PsctlError) for each in meeting.found)
    assert "worker/1" in str(meeting.found[0])


def test_only_ranks_with_messages_between_them_are_partners() -> None:
    assert partners(catalog.build("ring", 5), 0) == {1, 4}
    assert partners(catalog.build("sharded", 4), 3) == {0, 1, 2}
    assert partners(catalog.build("cpu", 3), 2) == {0}, "rank 0's process plays the helper"
