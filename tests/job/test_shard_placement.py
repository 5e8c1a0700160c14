"""Shards and their servers: whatever dies, joins, leaves and catches up, in whatever order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.job.shard_placement import ServerPlace, ShardPlacement
from psctl.types import Address, Assignment, ServerAt
from tests.examples import examples

SIZES = [10] * 10 + [5, 5]


def place(rank: int, incarnation: int = 0) -> ServerPlace:
    return ServerPlace(ServerAt(rank, incarnation, Address("10.0.0.1", 4000 + 10 * rank + incarnation)), rank % 3)


def four(replicas: int = 1) -> ShardPlacement:
    return ShardPlacement(SIZES, replicas, [place(rank) for rank in range(4)])


def fill(holdings: ShardPlacement) -> None:
    for shard, found in enumerate(holdings.copies):
        for server in found:
            holdings.caught_up(holdings.epoch, shard, server)


def settle(holdings: ShardPlacement) -> None:
    for _ in range(6):
        fill(holdings)
        holdings.advance(patient=False)
        for shard, before in list(holdings.handing.items()):
            holdings.handed_over(shard, before)
        holdings.news_for_servers(), holdings.news_for_workers()


def test_at_a_death_the_next_of_a_chain_is_its_head_at_once() -> None:
    holdings = four()
    dead = holdings.chains[0][0]
    heir = holdings.chains[0][1]
    assert holdings.lost([dead])
    assert holdings.chains[0] == [heir]
    told = holdings.news_for_workers()
    assert told is not None
    assert (told.epoch, told.owners[0]) == (1, heir)
    assert dead not in [at.rank for at in told.servers]
    assert holdings.news_for_workers() is None


def test_a_new_replica_stands_when_it_has_caught_up() -> None:
    holdings = four()
    holdings.lost([holdings.chains[0][0]])
    new = holdings.copies[0]
    assert len(new) == 1
    settle(holdings)
    assert new[0] in holdings.chains[0]
    assert all(len(chain) == 2 for chain in holdings.chains)
    assert holdings.settled


def test_without_replicas_a_death_loses_shards_and_changes_nothing() -> None:
    holdings = four(replicas=0)
    before = holdings.assignment
    assert not holdings.lost([0])
    assert holdings.assignment == before


def test_a_word_of_an_earlier_filling_does_not_count() -> None:
    holdings = four()
    holdings.lost([holdings.chains[0][0]])
    server = holdings.copies[0][0]
    holdings.caught_up(0, 0, server)
    holdings.advance(patient=False)
    assert len(holdings.chains[0]) == 1


def test_what_was_filled_by_a_head_that_died_is_filled_anew_by_the_next() -> None:
    holdings = ShardPlacement([1], 2, [place(rank) for rank in range(3)])
    second, third = holdings.chains[0][1:]
    holdings.lost([second])
    holdings.joined(place(3))
    assert holdings.copies[0] == [3]
    holdings.caught_up(holdings.epoch, 0, 3)
    early = holdings.epoch
    holdings.lost([holdings.chains[0][0]])
    assert (holdings.chains[0], holdings.copies[0]) == ([third], [3])
    holdings.caught_up(early, 0, 3)  # the dead one's word
    holdings.advance(patient=False)
    assert holdings.chains[0] == [third]
    holdings.caught_up(holdings.epoch, 0, 3)
    holdings.advance(patient=False)
    assert len(holdings.chains[0]) == 2


def test_workers_hear_of_a_hand_over_when_the_head_before_is_silent() -> None:
    holdings = four(replicas=0)
    holdings.joined(place(4))
    assert holdings.news_for_workers() is not None  # that there is another server
    fill(holdings)
    holdings.advance(patient=True)
    assert holdings.handing
    assert holdings.news_for_servers() is not None
    assert holdings.news_for_workers() is None
    for shard, before in list(holdings.handing.items()):
        holdings.handed_over(shard, (before + 1) % 4)  # not its word
        assert shard in holdings.handing
        holdings.handed_over(shard, before)
    told = holdings.news_for_workers()
    assert told is not None
    assert 4 in told.owners


def test_a_server_that_leaves_goes_when_workers_know_that_it_holds_nothing() -> None:
    holdings = four()
    holdings.leave([3])
    assert holdings.may_go() == []
    fill(holdings)
    holdings.advance(patient=True)
    for shard, before in list(holdings.handing.items()):
        holdings.handed_over(shard, before)
    assert holdings.may_go() == []  # workers still push there
    holdings.news_for_workers()
    assert holdings.may_go() == [3]
    assert 3 not in [at.rank for at in holdings.assignment.servers]


class Oracle:
    """What must be true of all that is told."""

    def __init__(self, holdings: ShardPlacement) -> None:
        self.holdings, self.servers, self.workers = holdings, holdings.assignment, holdings.assignment

    def look(self) -> None:
        holdings = self.holdings
        alive = holdings.places.keys()
        for chain, filled in zip(holdings.chains, holdings.copies, strict=True):
            assert chain
            assert len({*chain, *filled}) == len(chain) + len(filled)
            assert {*chain, *filled} <= alive
        for shard, before in holdings.handing.items():
            assert before in alive
            assert holdings.chains[shard][0] != before
        servers = holdings.news_for_servers()
        if servers is not None:
            self._rises(self.servers, servers)
            self.servers = servers
        workers = holdings.news_for_workers()
        if workers is not None:
            self._rises(self.workers, workers)
            assert not holdings.handing
            assert workers == self.servers, "servers hear of everything before workers do"
            self.workers = workers
        holdings.may_go()

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
    holdings, oracle, starts = four(replicas), None, dict.fromkeys(range(7), 0)
    oracle = Oracle(holdings)
    for what, number in happenings:
        match what:
            case "dies":
                holdings.lost([number])
            case "joins" if number not in holdings.places:
                starts[number] += 1
                holdings.joined(place(number, starts[number]))
            case "leaves" if holdings.places.keys() - holdings.leaving - {number}:
                holdings.leave([number])
            case "caught up":
                copying = [(shard, each) for shard, found in enumerate(holdings.copies) for each in found]
                if copying:
                    holdings.caught_up(holdings.epoch, *copying[number % len(copying)])
            case "handed over" if number in holdings.handing:
                holdings.handed_over(number, holdings.handing[number])
            case "goes on":
                holdings.advance(patient=bool(number))
        oracle.look()
    for _ in range(8):
        settle(holdings)
        oracle.look()
    assert holdings.settled
    assert not holdings.leaving & {server for chain in holdings.chains for server in chain}
