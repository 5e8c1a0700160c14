"""Stops and checkpoints while servers and workers come and go: whom they wait for, and who must hear of what."""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state.instructions import CheckpointCommitted, CommitCheckpoint, Connected
from psctl.job import events
from psctl.job.checkpoint_messages import ProposeCut, SaveBegin, SaveEnd
from psctl.job.membership_messages import Reassign, ShardCaughtUp, ShardHandedOver
from psctl.job.process_messages import StopProcesses, StopWanted
from psctl.job.training_messages import Join, Leave, MemberReady, Prepare
from psctl.types import Member
from tests.coordinator.play import A0, LAYOUT, W0, W1, Play, appended, told
from tests.coordinator.test_scaling import asks, move, newest
from tests.coordinator.test_surviving import ELASTIC, S, again, answer, dies, listens, training

STOP = StopWanted(True, False, "psctl stop")


def notices(play: Play) -> list[str]:
    return [event.text for event in appended(play.said, events.Notice)]


def refilled(play: Play, server: Member) -> Play:
    """A server dies, and the one in its place has what it is to hold."""
    dies(play, server)
    listens(play, again(server))
    before = newest(play)
    leading = {0: S[0], 1: S[1], 2: S[2], server.rank: again(server)}
    for shard, copying in enumerate(before.copies):
        for number in copying:
            play.hear(leading[before.owners[shard]], ShardCaughtUp(before.epoch, shard, number))
    play.wait(0.1)
    return play


def replaced(play: Play) -> Play:
    """Worker 1 has died; its replacement is started, and does not train yet."""
    dies(play, W1)
    play(Connected(again(W1)))
    play.hear(again(W1), Join(9))
    for server, shards in zip(S, ([0, 1], [2], [3, 4, 5]), strict=True):
        answer(play, server, 7, shards)
    play.hear(again(W1), Prepare(LAYOUT, ()))
    return play


def test_how_many_copies_shards_have_is_said_at_a_death_and_when_they_are_whole_again() -> None:
    play = training()
    dies(play, S[1])
    assert "were it to die before another is filled, all go back to the start" in notices(play)[-1]
    play = refilled(training(), S[1])
    assert "every shard is on 2 servers again" in notices(play)


def test_a_stop_in_the_midst_of_a_hand_over_still_tells_workers_of_it() -> None:
    play = training()
    asks(play, servers=2)
    before = newest(play)
    for shard, copying in enumerate(before.copies):
        for number in copying:
            play.hear(S[before.owners[shard]], ShardCaughtUp(before.epoch, shard, number))
    play.wait(0.1)
    after = newest(play)
    start = len(play.said)
    play.hear(A0, STOP)
    moved = [shard for shard, (old, new) in enumerate(zip(before.owners, after.owners, strict=True)) if old != new]
    assert moved
    for shard in moved:
        play.hear(S[before.owners[shard]], ShardHandedOver(after.epoch, shard))
    news = [member for member, _ in told(play.said[start:], Reassign)]
    assert news == [W0, W1], "without it they would wait for who is silent, and never come to the common step"


def test_a_stop_begins_no_new_move() -> None:
    play = training()
    dies(play, S[1])
    listens(play, again(S[1]))
    play.hear(A0, STOP)
    before = newest(play)
    for shard, copying in enumerate(before.copies):
        for number in copying:
            play.hear({0: S[0], 2: S[2]}[before.owners[shard]], ShardCaughtUp(before.epoch, shard, number))
    play.wait(1.0)
    assert newest(play) == before


def test_a_stop_waits_for_a_worker_that_is_being_replaced_and_asks_it_too() -> None:
    play = replaced(training())
    play.hear(A0, STOP)
    assert notices(play)[-1] == "the stop waits until worker/1 on h1 trains again"
    play.wait(1.0)
    assert told(play.said, ProposeCut) == []
    play.hear(again(W1), MemberReady())
    play.wait(0.1)
    assert [member for member, _ in told(play.said, ProposeCut)] == [W0, again(W1)]
    assert notices(play).count("stop wanted by psctl stop") == 1


def test_a_stop_by_force_waits_for_nobody() -> None:
    play = replaced(training())
    play.hear(A0, STOP)
    assert told(play.hear(A0, StopWanted(False, True, "psctl stop")), StopProcesses)


def test_a_stop_that_waits_ends_the_job_when_all_have_to_start_again() -> None:
    play = replaced(training())
    play.hear(A0, STOP)
    dies(play, S[0])
    dies(play, S[1])
    play.wait(1.0)
    assert told(play.said, StopProcesses)


def test_workers_are_not_scaled_while_one_is_being_replaced() -> None:
    answered = asks(replaced(training()), workers=1)
    assert answered.problem == "worker/1 on h1 is being started again"


def sends(play: Play, step: int, *members: Member) -> list:  # type: ignore[type-arg]
    new = []
    for member in members:
        new += play.hear(member, SaveBegin(step, []))
        new += play.hear(member, SaveEnd(step))
    return new


def commits(said: list) -> list[int]:  # type: ignore[type-arg]
    return [each.step for each in said if isinstance(each, CommitCheckpoint)]


def test_a_checkpoint_does_not_wait_for_a_server_that_leads_nothing() -> None:
    play = training()
    dies(play, S[1])
    listens(play, again(S[1]))
    new = sends(play, 9, W0, W1, S[0], S[2])
    assert commits(new) == [9]
    (commit,) = [each for each in new if isinstance(each, CommitCheckpoint)]
    assert commit.parameters == ["w"]


def test_a_part_that_was_begun_is_waited_for_whoever_sends_it() -> None:
    play = training()
    dies(play, S[1])
    listens(play, again(S[1]))
    play.hear(again(S[1]), SaveBegin(9, []))
    assert commits(sends(play, 9, W0, W1, S[0], S[2])) == []
    assert commits(play.hear(again(S[1]), SaveEnd(9))) == [9]


def test_an_empty_part_that_comes_after_the_checkpoint_is_whole_begins_no_other() -> None:
    play = training()
    dies(play, S[1])
    listens(play, again(S[1]))
    sends(play, 9, W0, W1, S[0], S[2])
    play(CheckpointCommitted(9, "there", 1, 0.1))
    assert commits(sends(play, 9, again(S[1]))) == []
    play.exits(W0)
    play.exits(W1)
    play.wait(1.0)
    assert told(play.said, Leave), "nothing is waited for at the end"


def test_a_move_makes_senders_of_those_that_lead_now() -> None:
    play = training(replace(ELASTIC, replicas=0))
    asks(play, servers=2)
    move(play)
    assert commits(sends(play, 9, W0, W1, S[0], S[1])) == [9]
