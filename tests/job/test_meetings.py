"""Workers that play a schedule learn where all of them listen, once all do; secrets stay on their host."""

from __future__ import annotations

from psctl.job.meetings import Listens, WorkerAt, WorkersAt
from psctl.words import Address
from tests.job.play import W0, W1, Play, told


def test_all_are_told_when_the_last_listens_and_of_secrets_only_their_own_hosts() -> None:
    play = Play().running()
    hosts = {rank.member: rank.host for rank in play.mind._job.of("worker")}
    there = {W0: Listens(Address("10.0.0.1", 4000), b"a" * 16), W1: Listens(Address("10.0.0.2", 4000), b"b" * 16)}
    assert told(play.hear(W0, there[W0]), WorkersAt) == []
    answers = told(play.hear(W1, there[W1]), WorkersAt)
    assert [asked for asked, _ in answers] == [W0, W1]
    for asked, answer in answers:
        assert answer.workers == [
            WorkerAt(each.rank, 0, says.address, says.secret if hosts[each] == hosts[asked] else b"")
            for each, says in there.items()
        ]
