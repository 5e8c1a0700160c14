"""Shards and their servers under any order of losses, joins, releases and fills."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.coordinator.policies.shard_placement import ServerPlace, ShardPlacement
from psctl.types import Address, Assignment, ServerAt
from tests.hypothesis_profile import examples

SIZES = [10] * 10 + [5, 5]


def place(rank: int, incarnation: int = 0) -> ServerPlace:
    return ServerPlace(ServerAt(rank, incarnation, Address("10.0.0.1", 4000 + 10 * rank + incarnation)), rank % 3)


def four(replicas: int = 1) -> ShardPlacement:
    return ShardPlacement(SIZES, replicas, [place(rank) for rank in range(4)])


def fill(placement: ShardPlacement) -> None:
    for shard, found in enumerate(placement.copies):
        for server in found:
            placement.on_caught_up(placement.epoch, shard, server)


def settle(placement: ShardPlacement) -> None:
    for _ in range(6):
        fill(placement)
        placement.advance(patient=False)
        for shard, before in list(placement.transfers.items()):
            placement.on_transferred(shard, before)
        placement.news_for_servers(), placement.news_for_workers()


def test_at_a_death_the_next_of_a_chain_is_its_head_at_once() -> None:
    placement = four()
    dead = placement.chains[0][0]
    new_primary = placement.chains[0][1]
    assert placement.remove_lost([dead])
    assert placement.chains[0] == [new_primary]
    told = placement.news_for_workers()
    assert told is not None
    assert (told.epoch, told.owners[0]) == (1, new_primary)
    assert dead not in [at.rank for at in told.servers]
    assert placement.news_for_workers() is None


def test_a_new_replica_stands_when_it_has_caught_up() -> None:
    placement = four()
    placement.remove_lost([placement.chains[0][0]])
    new = placement.copies[0]
    assert len(new) == 1
    settle(placement)
    assert new[0] in placement.chains[0]
    assert all(len(chain) == 2 for chain in placement.chains)
    assert placement.settled


def test_without_replicas_a_death_loses_shards_and_changes_nothing() -> None:
    placement = four(replicas=0)
    before = placement.assignment
    assert not placement.remove_lost([0])
    assert placement.assignment == before


def test_a_word_of_an_earlier_filling_does_not_count() -> None:
    placement = four()
    placement.remove_lost([placement.chains[0][0]])
    server = placement.copies[0][0]
    placement.on_caught_up(0, 0, server)
    placement.advance(patient=False)
    assert len(placement.chains[0]) == 1


def test_a_copy_filled_by_a_lost_primary_is_filled_anew_by_the_next() -> None:
    placement = ShardPlacement([1], 2, [place(rank) for rank in range(3)])
    second, third = placement.chains[0][1:]
    placement.remove_lost([second])
    placement.add_server(place(3))
    assert placement.copies[0] == [3]
    placement.on_caught_up(placement.epoch, 0, 3)
    early = placement.epoch
    placement.remove_lost([placement.chains[0][0]])
    assert (placement.chains[0], placement.copies[0]) == ([third], [3])
    placement.on_caught_up(early, 0, 3)  # the dead one's word
    placement.advance(patient=False)
    assert placement.chains[0] == [third]
    placement.on_caught_up(placement.epoch, 0, 3)
    placement.advance(patient=False)
    assert len(placement.chains[0]) == 2


def test_workers_get_a_transfer_when_the_former_primary_has_stopped() -> None:
    placement = four(replicas=0)
    placement.add_server(place(4))
    assert placement.news_for_workers() is not None  # that there is another server
    fill(placement)
    placement.advance(patient=True)
    assert placement.transfers
    assert placement.news_for_servers() is not None
    assert placement.news_for_workers() is None
    for shard, before in list(placement.transfers.items()):
        placement.on_transferred(shard, (before + 1) % 4)  # not its word
        assert shard in placement.transfers
        placement.on_transferred(shard, before)
    told = placement.news_for_workers()
    assert told is not None
    assert 4 in told.owners


def test_a_server_that_leaves_ends_when_workers_have_the_assignment_without_it() -> None:
    placement = four()
    placement.release([3])
    assert placement.forget_released() == []
    fill(placement)
    placement.advance(patient=True)
    for shard, before in list(placement.transfers.items()):
        placement.on_transferred(shard, before)
    assert placement.forget_released() == []  # workers still push there
    placement.news_for_workers()
    assert placement.forget_released() == [3]
    assert 3 not in [at.rank for at in placement.assignment.servers]


class Oracle:
    """What must be true of all that is told."""

    def __init__(self, placement: ShardPlacement) -> None:
        self.placement, self.servers, self.workers = placement, placement.assignment, placement.assignment

    def look(self) -> None:
        placement = self.placement
        alive = placement.places.keys()
        for chain, filled in zip(placement.chains, placement.copies, strict=True):
            assert chain
            assert len({*chain, *filled}) == len(chain) + len(filled)
            assert {*chain, *filled} <= alive
        for shard, before in placement.transfers.items():
            assert before in alive
            assert placement.chains[shard][0] != before
        servers = placement.news_for_servers()
        if servers is not None:
            self._rises(self.servers, servers)
            self.servers = servers
        workers = placement.news_for_workers()
        if workers is not None:
            self._rises(self.workers, workers)
            assert not placement.transfers
            assert workers == self.servers, "servers hear of everything before workers do"
            self.workers = workers
        placement.forget_released()

    @staticmethod
    def _rises(before: Assignment, after: Assignment) -> None:
        assert after.epoch > before.epoch


HAPPENS = st.one_of(
    st.tuples(st.just("dies"), st.integers(0, 6)),
    st.tuples(st.just("joins"), st.integers(0, 6)),
    st.tuples(st.just("leaves"), st.integers(0, 6)),
    st.tuples(st.just("caught up"), st.integers(0, 40)),
    st.tuples(st.just("handed over"), st.integers(0, 5)),
    st.tuples(st.just("goes on"), st.integers(0, 1)),
)


@settings(max_examples=examples(200))
@given(st.integers(0, 2), st.lists(HAPPENS, max_size=40))
def test_whatever_happens_every_shard_has_a_living_head_and_workers_hear_last(
    replicas: int, happenings: list[tuple[str, int]]
) -> None:
    placement, oracle, starts = four(replicas), None, dict.fromkeys(range(7), 0)
    oracle = Oracle(placement)
    for what, number in happenings:
        match what:
            case "dies":
                placement.remove_lost([number])
            case "joins" if number not in placement.places:
                starts[number] += 1
                placement.add_server(place(number, starts[number]))
            case "leaves" if placement.places.keys() - placement.leaving - {number}:
                placement.release([number])
            case "caught up":
                copying = [(shard, each) for shard, found in enumerate(placement.copies) for each in found]
                if copying:
                    placement.on_caught_up(placement.epoch, *copying[number % len(copying)])
            case "handed over" if number in placement.transfers:
                placement.on_transferred(number, placement.transfers[number])
            case "goes on":
                placement.advance(patient=bool(number))
        oracle.look()
    for _ in range(8):
        settle(placement)
        oracle.look()
    assert placement.settled
    assert not placement.leaving & {server for chain in placement.chains for server in chain}
