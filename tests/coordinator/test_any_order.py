"""Servers and workers that die, come, go and answer in any order: what must be true of all that the mind then says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    Append,
    Close,
    Connected,
    ConnectionLost,
    FindRestorable,
    Happening,
    Heard,
    Restorable,
    Start,
    Tick,
    Written,
)
from psctl.job import events, job_messages, membership_messages
from psctl.types import Address, Member
from tests.coordinator.play import A0, A1, LAYOUT, Play, told
from tests.coordinator.test_surviving import ELASTIC, training
from tests.examples import examples

ROOMY = replace(ELASTIC, hosts=[replace(host, slots=3) for host in ELASTIC.hosts])
ANYBODY = st.builds(Member, st.sampled_from(["worker", "server"]), st.integers(0, 3), st.integers(0, 2))
SERVER = st.builds(Member, st.just("server"), st.integers(0, 3), st.integers(0, 1))
AGENT = st.sampled_from([A0, A1])
CLOCKS = st.dictionaries(st.integers(0, 5), st.integers(0, 3), min_size=3)
MESSAGES = st.one_of(
    st.just(job_messages.Join(1)), st.just(job_messages.Prepare(LAYOUT, ())), st.builds(job_messages.Finished,
    st.integers(0, 9)), st.builds(job_messages.Ready, st.sampled_from([None, Address("10.0.0.1", 1)])),
    st.builds(job_messages.SaveBegin, st.integers(1, 3), st.just([])), st.builds(job_messages.SaveEnd, st.integers(1,
    3)), st.builds(job_messages.Position, st.integers(1, 2), st.integers(0, 9)),
)  # fmt: skip
ANSWERS = st.one_of(
    st.builds(membership_messages.HeldOf, st.integers(0, 2), st.integers(0, 1), CLOCKS, CLOCKS),
    st.builds(membership_messages.CaughtUp, st.integers(0, 9), st.integers(0, 6), st.integers(0, 3)),
    st.builds(membership_messages.HandedOver, st.integers(0, 9), st.integers(0, 6)),
    st.builds(membership_messages.ServerUnreachable, st.integers(0, 3), st.integers(0, 1), st.just("reset")),
)  # fmt: skip
ANYTHING: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Heard, ANYBODY, MESSAGES),
    st.builds(Heard, SERVER, ANSWERS),
    st.builds(Heard, AGENT, st.builds(job_messages.Exited, ANYBODY, st.sampled_from([0, -9, -9, 1]))),
    st.builds(Heard, AGENT, st.builds(job_messages.Started, ANYBODY, st.just(5))),
    st.builds(
        Heard,
        AGENT,
        st.builds(
            job_messages.ScaleWanted,
            st.just(1),
            st.sampled_from([None, None, 1, 3]),
            st.sampled_from([None, 1, 2, 4]),
        ),
    ),
    st.builds(Connected, ANYBODY),
    st.builds(ConnectionLost, ANYBODY, st.just("reset")),
    st.builds(Written, st.integers(1, 3)),
    st.just(Restorable(None)),
    st.just(Tick()),
)


@settings(max_examples=examples(200))
@given(st.sampled_from(["wait", "continue"]), st.integers(0, 1), st.lists(ANYTHING, max_size=60), st.data())
def test_whatever_happens(deaths: str, replicas: int, happenings: list[Happening], data: st.DataObject) -> None:
    play = training(replace(ROOMY, on_worker_loss=deaths, replicas=replicas))
    answered = 0
    for happening in happenings:
        play.now += data.draw(st.sampled_from([0.0, 0.1, 0.5, 31.0]))
        asked = sum(isinstance(each, FindRestorable) for each in play.said)
        if isinstance(happening, Restorable):
            if asked == answered:
                continue  # the shell answers questions, and each once
            answered += 1
        play(happening)
    play.hear(A0, job_messages.StopWanted(False, True, "the test"))
    play.wait(2000)
    look(play)


def look(play: Play) -> None:
    """Hold what was said against what must be true."""
    assert play.mind.over
    ends = [
        n for n, each in enumerate(play.said) if isinstance(each, Append) and isinstance(each.event, events.Finished)
    ]
    assert len(ends) == 1
    assert isinstance(play.said[ends[0] + 1], Close)
    assert len(play.said) == ends[0] + 2
    started = [each.member for each in play.said if isinstance(each, Start)]
    assert len(started) == len(set(started)), "an incarnation is started once"
    for rank in {(each.role, each.rank) for each in started}:
        mine = [each.incarnation for each in started if (each.role, each.rank) == rank]
        assert mine == list(range(len(mine))), "incarnations rise by one"
    heard: dict[Member, int] = {}
    for member, message in told(play.said, membership_messages.Reassign):
        assert message.assignment.epoch > heard.get(member, -1), "epochs rise for everyone who hears of them"
        heard[member] = message.assignment.epoch
        assert all(message.assignment.chains)
        alive = {at.rank for at in message.assignment.servers}
        assert {server for chain in message.assignment.chains for server in chain} <= alive
    counted = [
        (member, each.rank, each.incarnation) for member, each in told(play.said, membership_messages.CountUntil)
    ]
    assert len(counted) == len(set(counted)), "a dead worker is cut once"
