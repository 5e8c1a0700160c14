"""Host sums and separate pushes in every mixture and order: equal bits, and each worker counted once.

`Play` drives one shard's state machine as workers of shared hosts do. Connections keep the order of messages, which
arrive in halves. A worker that has offered its gradients sends nothing until it receives Leads, or PushAlone of its
collector.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from psctl.errors import MessageRefused, ProtocolError
from psctl.ps.dense.clock_ledger import Membership, StepOrder
from psctl.ps.dense.host_sums import RankGradients, host_sum, in_turn, joint_weight
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.server.push_staging import StagedTransfer, read_transfer
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import Leads, Pull, Push, Pushed, PushStaged, SharedRange, Values
from psctl.ps.outputs import ToServer, ToWorker
from psctl.ps.pieces import bytes_view, pieces
from psctl.types import Layout, ParameterInfo, Range, Shard
from tests.hypothesis_profile import examples

GROUPS = [{"lr": 0.1, "momentum": 0.9}]
LAYOUT = Layout((ParameterInfo("a", (13,), "float32", 0), ParameterInfo("b", (6,), "float32", 0)), "SGD", tuple(GROUPS))
SIZE = 19
SHARD = Shard(0, "float32", Range(0, SIZE))
HELD = pieces(LAYOUT, [SHARD])[0]
HOSTS = [(), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((1, 2, 4),), ((0, 1, 2, 3, 4),)]
WORLD = 5


def make(hosts, me=0, chain=(0,), started=True, world=WORLD) -> DenseShard:
    machine = DenseShard(Terms(LAYOUT, world, "server", hosts=hosts), SHARD, HELD, me, lambda server: True)
    machine.on_assignment(0, chain, [], lambda server: True)
    if started:
        machine.start_values_buffer(0, 4 * SIZE)[:] = bytes_view(torch.linspace(-1, 1, SIZE))
        machine.on_start_values()
    return machine


def part(rank: int, clock: int) -> RankGradients:
    gradients = torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * clock + rank))
    present = (b"\1\1", b"\1\1", b"\1\0", b"\0\1", b"\1\1")[(rank + clock) % 5]
    for piece, there in zip(HELD, present, strict=True):
        if not there:
            gradients[piece.at : piece.at + piece.size] = float("nan")
    return RankGradients(rank, (1.0, 0.7, 1.3)[(rank + clock) % 3], present, gradients)


def push(clock: int, rank: int) -> tuple[Push, bytes]:
    one = part(rank, clock)
    return Push(0, clock, one.weight, one.present, clock), bytes(bytes_view(one.gradients))


def cover(clock: int, group) -> tuple[Push, bytes]:
    parts, out = [part(rank, clock) for rank in group], torch.full((SIZE,), 5.0)
    present = host_sum(out, HELD, parts)
    weight = joint_weight(one.weight for one in parts)
    return Push(0, clock, weight, present, clock, covers=tuple(group)), bytes(bytes_view(out))


def by_hand(hosts, membership: Membership, clocks: int) -> torch.Tensor:
    """Sum whole tensors, host by host."""
    values = torch.linspace(-1, 1, SIZE).requires_grad_()
    optimizer = torch.optim.SGD([values], **GROUPS[0])
    for clock in range(clocks):
        joint, weight = torch.zeros(SIZE), 0.0
        for at, piece in enumerate(HELD):
            span, total = slice(piece.at, piece.at + piece.size), None
            for group in in_turn(hosts, membership.at(clock)):
                each = [part(rank, clock) for rank in group]
                some = [one.gradients[span] * one.weight for one in each if one.present[at]]
                together = some[0] if some else None
                for one in some[1:]:
                    together = together + one
                if together is not None:
                    total = together if total is None else total + together
            joint[span] = 0 if total is None else total
        for group in in_turn(hosts, membership.at(clock)):
            weight += joint_weight(part(rank, clock).weight for rank in group)
        near = abs(weight - WORLD) <= 1e-9 * WORLD
        values.grad = joint / (WORLD if near else weight)
        optimizer.step()
    return values.detach()


class Play:
    """Workers of shared hosts and one shard; `machines` are its servers, one of them the primary."""

    def __init__(self, hosts, draw) -> None:
        self.hosts, self.draw, self.clock = hosts, draw, 0
        self.membership = Membership.initial(WORLD, 0)
        self.machines = {0: make(hosts)}
        self.lead, self.epoch = 0, 0
        self.lines: dict[int, deque] = {rank: deque() for rank in range(WORLD)}
        self.half: dict[int, tuple] = {}  # rank -> a message that is coming in
        self.taken: set[int] = set()  # ranks with a staged push
        self.silent: set[int] = set()  # ranks that have offered gradients and wait
        self.happened: set[str] = set()
        self.deaths = 0

    @property
    def machine(self) -> DenseShard:
        return self.machines[self.lead]

    @property
    def alive(self) -> tuple[int, ...]:
        return self.membership.at(self.clock)

    def say(self, rank: int, message: Push, data: bytes) -> None:
        """Queue a push."""
        self.lines[rank].append((message, data))

    def alone(self, rank: int) -> None:
        """Push a worker's own gradients, again or for the first time."""
        self.silent.discard(rank)
        self.taken.discard(rank)
        self.say(rank, *push(self.clock, rank))

    def together(self, sender: int, group) -> None:
        """Push a host sum; the workers that offered gradients send nothing from now on."""
        self.silent.update(one for one in group if one not in self.taken and not self.lines[one] and one != sender)
        self.say(sender, *cover(self.clock, group))

    def move(self, rank: int) -> None:
        """Deliver the next half of a message."""
        if rank in self.half:
            message, data, where = self.half.pop(rank)
            if where is not None:
                where[len(data) // 2 :] = data[len(data) // 2 :]
            self.hear(self.machine.on_push(rank, message, len(data)))
        elif self.lines[rank]:
            message, data = self.lines[rank].popleft()
            where = self.machine.push_buffer_for(rank, message, len(data))
            if where is not None:
                where[: len(data) // 2] = data[: len(data) // 2]
            self.half[rank] = message, data, where

    def snap(self, rank: int) -> None:
        """Break a worker's connection; the workers in its host sums are notified."""
        lost = [message for message, _ in self.lines[rank]] + [one[0] for one in [self.half.get(rank)] if one]
        covers = {one for message in lost for one in message.covers}
        self.lines[rank].clear()
        self.half.pop(rank, None)
        self.machine.on_worker_disconnected(rank)
        self.alone(rank)
        for one in sorted((covers | self.silent) - {rank} - self.taken):
            self.alone(one)

    def dies(self, rank: int, *, replaced: bool) -> None:
        """End a worker; its cut is the last clock that this shard and others hold of it without host sums."""
        self.deaths += 1
        self.lines[rank].clear()
        self.half.pop(rank, None)
        self.machine.on_worker_disconnected(rank)
        cut = self.draw(st.integers(self.clock - 1, self.machine.last_separate_clock_of(rank)))
        self.happened.add(
            "covered death" if self.machine.last_separate_clock_of(rank) < self.machine.last_clock_of(rank) else "death"
        )
        self.taken.discard(rank)
        self.silent.discard(rank)
        self.hear(self.machine.drop_pushes_after(rank, cut))
        if not replaced and cut < self.clock:
            rest = [one for one in self.alive if one != rank]
            self.membership = self.membership.changed(self.clock, rest)
            self.hear(self.machine.set_members(self.membership))
        elif cut < self.clock:
            self.alone(rank)
        else:
            self.taken.add(rank)
        for one in sorted(self.silent):  # whose line to it is broken
            self.alone(one)

    def hand_over(self) -> None:
        """Fill another server and make it primary; workers repeat everything there."""
        new = 1 + max(self.machines)
        old, self.machines[new] = self.lead, make(self.hosts, new, (self.lead,), started=False)
        self.machines[new].set_members(self.membership)
        for chain, copies in (([old], [new]), ([new], [])):
            self.epoch += 1
            out = []
            for rank in (old, new):
                out += [
                    (rank, one) for one in self.machines[rank].on_assignment(self.epoch, chain, copies, lambda _: True)
                ]
            while out:
                source, one = out.pop(0)
                if isinstance(one, ToServer):
                    machine, size = self.machines[one.server], len(one.payload or b"")
                    if size:
                        machine.replica_buffer_for(source, one.message, size)[:] = one.payload
                    out += [(one.server, more) for more in machine.on_server_message(source, one.message, size)]
        assert self.machines[new].leads
        self.lead = new
        for rank in self.alive:
            self.lines[rank].clear()
            self.half.pop(rank, None)
            self.machines[old].on_worker_disconnected(rank)
            self.alone(rank)

    def hear(self, outputs) -> None:
        for one in outputs:
            if (
                isinstance(one, ToWorker)
                and isinstance(one.message, PushStaged | Pushed)
                and one.message.clock == self.clock
            ):
                self.taken.add(one.rank)
                self.silent.discard(one.rank)
            elif isinstance(one, ToWorker) and isinstance(one.message, Leads) and one.rank in self.alive:
                self.happened.add("asked again")
                self.alone(one.rank)

    def act(self) -> None:
        groups = [group for group in in_turn(self.hosts, self.alive) if len(group) > 1]
        kinds = ["move"] * 12 + ["alone"] * 3 + ["snap", "hand over"] + ["dies", "leaves"] * (self.deaths < 2)
        kind = self.draw(st.sampled_from(kinds + ["together"] * 6 * bool(groups)))
        rank = self.draw(st.sampled_from(self.alive))
        match kind:
            case "move":
                self.move(rank)
            case "alone" if not self.lines[rank] and rank not in self.half:
                self.alone(rank)
            case "together":
                group = self.draw(st.sampled_from(groups))
                self.together(self.draw(st.sampled_from(group)), group)
            case "snap":
                self.snap(rank)
            case "dies" | "leaves" if kind == "dies" or len(self.alive) > 2:
                self.dies(rank, replaced=kind == "dies")
            case "hand over" if len(self.machines) < 3:
                self.hand_over()

    def finish(self) -> None:
        """Deliver all messages, push for the ranks that have not, and order the clock."""
        for group in in_turn(self.hosts, self.alive):
            idle = [one for one in group if one not in self.taken | self.silent | self.half.keys()]
            idle = [one for one in idle if not self.lines[one]]
            if len(idle) == len(group) > 1 and self.draw(st.booleans()):
                self.together(self.draw(st.sampled_from(group)), group)
                continue
            for rank in idle:
                self.alone(rank)
        for _ in range(2000):
            busy = [rank for rank in self.lines if self.lines[rank] or rank in self.half]
            if not busy:
                break
            self.move(self.draw(st.sampled_from(busy)) if len(busy) > 1 else busy[0])
        assert not self.silent, "someone has handed in, and nobody asks for it"
        assert self.taken >= set(self.alive)
        self.happened.add("in a host sum" if transfer_of(self.machine).covered else "apart")
        self.hear(self.machine.on_step_order(self.clock, StepOrder(GROUPS, None, False)))
        assert self.machine.version == self.clock + 1, "all were taken, and yet the clock is not whole"
        self.clock += 1
        self.taken.clear()


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from(HOSTS))
def test_every_mixture_and_order_of_pushes_gives_bitwise_equal_values(data, hosts):
    play = Play(hosts, data.draw)
    for _ in range(2):
        for _ in range(data.draw(st.integers(0, 25))):
            play.act()
        play.finish()
    for what in sorted(play.happened):
        event(what)
    assert torch.equal(play.machine.state.values, by_hand(hosts, play.membership, 2))
    assert play.machine.state.applied == {**play.machine.state.applied, **dict.fromkeys(play.alive, 1)}
    assert not transfer_of(play.machine).pushes, "nothing is left over"


def transfer_of(machine: DenseShard) -> StagedTransfer:
    """Return what a transfer of the shard would contain."""
    head, _ = machine.staging.staged_state()
    return read_transfer(head, 0)


def bring(machine: DenseShard, rank: int, message: Push, data: bytes):
    where = machine.push_buffer_for(rank, message, len(data))
    if where is not None:
        where[:] = data
    return machine.on_push(rank, message, len(data))


def kinds(outputs) -> list:
    return [(one.rank, type(one.message)) for one in outputs if isinstance(one, ToWorker)]


def test_a_host_sum_is_acknowledged_to_each_covered_rank():
    machine = make(((0, 1), (2, 3)), world=4)
    assert kinds(bring(machine, 1, *cover(0, (0, 1)))) == [(0, PushStaged), (1, PushStaged)]
    assert [machine.last_clock_of(rank) for rank in range(4)] == [0, 0, -1, -1]
    bring(machine, 2, *cover(0, (2, 3)))
    for rank in range(4):
        machine.on_pull(rank, Pull(1, [0], 1, [0]))
    out = machine.on_step_order(0, StepOrder(GROUPS, None, False))
    assert kinds(out) == [(rank, Values) for rank in range(4)]
    assert kinds(bring(machine, 3, *push(0, 3))) == [(3, PushStaged), (3, Pushed)]


def test_a_host_sum_is_dropped_when_a_covered_rank_pushed_separately():
    machine = make(((0, 1, 2),), world=3)
    bring(machine, 1, *push(0, 1))
    message, data = cover(0, (0, 1, 2))
    assert machine.push_buffer_for(0, message, len(data)) is None
    assert kinds(machine.on_push(0, message, len(data))) == [(0, Leads), (2, Leads)]
    assert kinds(bring(machine, 1, *cover(0, (0, 1, 2)))) == [(1, PushStaged), (0, Leads), (2, Leads)]


def test_a_separate_push_during_the_transfer_of_a_host_sum_is_detected():
    machine = make(((0, 1),), world=2)
    message, data = cover(0, (0, 1))
    where = machine.push_buffer_for(0, message, len(data))
    bring(machine, 1, *push(0, 1))
    where[:] = data
    assert kinds(machine.on_push(0, message, len(data))) == [(0, Leads)]
    assert [machine.last_clock_of(0), machine.last_clock_of(1)] == [-1, 0]


def test_bytes_arriving_for_a_dropped_push_change_no_value():
    machine = make(((0, 1),), world=3)
    late, data = push(0, 1)
    where = machine.push_buffer_for(1, late, len(data))
    bring(machine, 0, *cover(0, (0, 1)))
    other, theirs = push(0, 2)
    machine.push_buffer_for(2, other, len(theirs))[:] = theirs  # whose buffer may not be that one
    where[:] = bytes(len(data))
    machine.on_push(2, other, len(theirs))
    assert kinds(machine.on_push(1, late, len(data))) == [(1, PushStaged)]
    machine.on_step_order(0, StepOrder(GROUPS, None, False))
    clean = make(((0, 1),), world=3)
    for rank in (2, 1, 0):
        bring(clean, rank, *push(0, rank))
    clean.on_step_order(0, StepOrder(GROUPS, None, False))
    assert torch.equal(machine.state.values, clean.state.values)


def test_the_cut_of_a_lost_rank_excludes_revocable_host_sums():
    machine = make(((0, 1),), world=3)
    bring(machine, 0, *cover(0, (0, 1)))
    assert [machine.last_clock_of(1), machine.last_separate_clock_of(1)] == [0, -1]  # staged, or summed already
    assert kinds(machine.drop_pushes_after(1, -1)) == [(0, Leads), (1, Leads), (2, Leads)]
    assert machine.last_clock_of(0) == -1
    bring(machine, 0, *push(0, 0))
    assert machine.last_separate_clock_of(0) == 0


def test_a_staged_host_sum_is_dropped_with_each_of_its_ranks():
    """Rank 0 has not pushed, so the sum of 1 and 2 is staged; when one of them is cut, the other is asked to push."""
    for cut, sender in ((1, 1), (2, 1), (1, 2), (2, 2)):
        machine = make(((1, 2),), world=3)
        bring(machine, sender, *cover(0, (1, 2)))
        assert machine.last_separate_clock_of(cut) == -1
        assert (3 - cut, Leads) in kinds(machine.drop_pushes_after(cut, -1))
        assert [machine.last_clock_of(1), machine.last_clock_of(2)] == [-1, -1]
        ends_clean(machine, ((1, 2),))


def test_a_staged_host_sum_is_dropped_when_a_covered_rank_leaves():
    machine = make(((1, 2, 3),), world=4)
    bring(machine, 1, *cover(0, (1, 2, 3)))
    fewer = Membership.initial(4, 0).changed(0, [0, 1, 2])
    assert [(1, Leads), (2, Leads)] == [one for one in kinds(machine.set_members(fewer)) if one[0] in (1, 2)]
    assert [machine.last_clock_of(1), machine.last_clock_of(2)] == [-1, -1]
    assert kinds(bring(machine, 2, *cover(0, (1, 2)))) == [(1, PushStaged), (2, PushStaged)]


def test_bytes_of_a_dropped_host_sum_are_received_into_an_unused_buffer():
    machine = make(((1, 2),), world=3)
    message, data = cover(0, (1, 2))
    where = machine.push_buffer_for(1, message, len(data))
    machine.drop_pushes_after(2, -1)
    bring(machine, 0, *push(0, 0))
    bring(machine, 2, *push(0, 2))
    where[:] = bytes(len(data))
    assert kinds(machine.on_push(1, message, len(data))) == [(1, Leads)]
    ends_clean(machine, ((1, 2),))


@pytest.mark.parametrize("first", [0, 1])
def test_host_sums_are_transferred_unchanged(first):
    """Staged host sums (rank 0 has not pushed), and summed ones."""
    hosts = ((first, 2),)
    old, new = make(hosts, world=3), make(hosts, 1, (1,), world=3)
    bring(old, first, *cover(0, (first, 2)))
    head, data = old.staging.staged_state()
    new.staging.restore_staged(head, data)
    assert [new.last_clock_of(2), new.last_separate_clock_of(2)] == [0, -1]
    ends_clean(new, hosts)


def ends_clean(machine, hosts) -> None:
    """Finish all pushes; the values equal those after separate pushes."""
    clean = make(hosts, world=3)
    for one in (machine, clean):
        for rank in range(3):
            bring(one, rank, *push(0, rank))
        one.on_step_order(0, StepOrder(GROUPS, None, False))
        assert one.version == 1
    assert torch.equal(machine.state.values, clean.state.values)


@pytest.mark.parametrize("hosts", [((1, 2),), ()])
def test_a_host_sum_that_does_not_cover_its_host_is_refused(hosts):
    machine = make(hosts, world=4)
    assert kinds(bring(machine, 1, *cover(0, (1, 2, 3)))) == [(1, Leads), (2, Leads), (3, Leads)]
    assert [machine.last_clock_of(rank) for rank in range(4)] == [-1] * 4


@pytest.mark.parametrize("leads", [True, False])
def test_a_host_sum_without_its_sender_is_refused_and_changes_no_state(leads):
    machine = make(((1, 2),), chain=(0,) if leads else (1, 0), started=leads, world=3)
    message, data = cover(0, (1, 2))
    for one in (message, replace(message, clock=-1), replace(message, present=b"\0\0")):
        with pytest.raises(MessageRefused, match="worker/0, shard 0: Push: a sum of 2 workers without the sender"):
            machine.push_buffer_for(0, one, len(data))
        with pytest.raises(MessageRefused, match="a sum of 2 workers without the sender"):
            machine.on_push(0, one, 0)
        with pytest.raises(MessageRefused, match="a sum of 2 workers without the sender"):
            machine.on_push(0, one, len(data))
    if leads:
        assert [machine.last_clock_of(rank) for rank in range(3)] == [-1] * 3
        assert kinds(bring(machine, 1, message, data)) == [(1, PushStaged), (2, PushStaged)]


def test_a_host_sum_is_never_shared():
    machine = make(((1, 2),), world=3)
    _, data = cover(0, (1, 2))
    shared = Push(0, 0, 2.0, b"\1\1", 0, at=SharedRange(0, 0, 76), covers=(1, 2))
    with pytest.raises(ProtocolError, match="worker/1"):
        machine.on_push(1, shared, 0, memoryview(bytearray(data)))


def test_values_reported_as_landed_by_a_host_sum_are_updated_in_place():
    """Only for ranks that reported it themselves; reports of an older incarnation do not count."""
    machine = make(((0, 1),), world=2)
    for clock in range(3):
        before = machine.state.values.data_ptr()
        for rank in range(2):
            machine.on_pull(rank, Pull(clock, [0], clock, [clock - 1]))
        bring(machine, 0, *cover(clock, (0, 1)))
        machine.on_step_order(clock, StepOrder(GROUPS, None, False))
        assert (machine.state.values.data_ptr() == before) == (clock > 0), clock
