"""The training state that a lost worker's replacement takes from another rank, in the middle of a step.

Parameters and the optimizer's state are equal on all ranks and do not change between the start of a step and its
`optimizer.step()`, and so does the rest: the position in the data, the scheduler, the groups' numbers. So any rank that
is in the backward of the step can give them. Rank 0's own state is not on the others: buffers (running statistics),
objects given to `run.track`, and random numbers that the script draws outside of steps. The buffers are passed to one
other rank, their keeper, in each round, before it begins the round's last sum; so when a rank has all sums of a round,
the keeper has rank 0's buffers after it. A script with tracked objects or random numbers of its own goes back to a
checkpoint when worker/0 is lost; for other workers rank 0 has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from psctl.collectives.allreduce_backends import ScheduleAllReduce, compare, pass_on
from psctl.collectives.channel import UNUSED_TAG, Parcel, PendingTransfer
from psctl.collectives.data_plane import DataPlane
from psctl.collectives.rendezvous import partners
from psctl.errors import PeerLost
from psctl.ps.pieces import torch_dtype
from psctl.schedule.schedule import Schedule
from psctl.train_state.rank_state import has_own_state, with_buffers
from psctl.train_state.training_parts import TrainingParts
from psctl.types import State

BUFFERS = UNUSED_TAG - 2
"""The tag of rank 0's buffers."""


class StateHeader(msgspec.Struct, frozen=True):
    """The part of the state that is not tensors, and the tensors that follow: name, type and shape of each.

    `tuning`: the progress of the choice of a bucket size.
    """

    step: int
    optimizer: State
    rank_state: bytes
    tuning: State
    tensors: list[tuple[str, str, tuple[int, ...]]]


class ReplacementState:
    """One rank's part of the exchange.

    Args:
        me: this rank.
        schedule: of the sums; the keeper is one of rank 0's partners.
        parts: what is trained.
        step: steps that were made before this process began to train.
        report: reports that no worker has the state, with the reason; the job then ends this process.
    """

    def __init__(
        self, me: int, schedule: Schedule, parts: TrainingParts, step: int, report: Callable[[str], NoReturn]
    ) -> None:
        self.me = me
        self.refuse = report
        self.taken: tuple[int, bytes] | None = None
        """The step at which this replacement continues, and rank 0's state there."""
        self._parts, self._schedule = parts, schedule
        self._ended = step
        self._noted: tuple[int, Callable[[], bytes]] | None = None
        self._sending: tuple[DataPlane, PendingTransfer] | None = None
        self._kept: dict[int, torch.Tensor] = {}
        """Of the keeper: round -> rank 0's buffers after it, as bytes; of the last two rounds."""
        self._space = torch.empty(0, dtype=torch.uint8)

    def keep_start(self) -> None:
        """Keep the buffers with which all ranks begin: rank 0's."""
        self._kept = {-1: _joined(self._buffers())}

    def note(self, step: int, make: Callable[[], bytes]) -> None:
        """Take the function that returns this rank's own state at the start of the step after `step`."""
        self._noted = step, make

    def on_step_end(self) -> None:
        """Count a step."""
        self._ended += 1

    def _buffers(self) -> list[torch.Tensor]:
        return [one.detach().contiguous().view(-1).view(torch.uint8) for one in self._parts.buffers().values()]

    # ---- rank 0's buffers ----------------------------------------------------------------------------------------

    def pass_buffers(self, plane: DataPlane, round_: int) -> None:
        """Pass rank 0's buffers to their keeper: called by every rank before it begins a round's last sum.

        Raises:
            PeerLost: the other end is lost.
        """
        to = keeper(self._schedule, plane.hosts)
        if self.me not in (0, to) or not (found := self._buffers()):
            return
        size = sum(one.numel() for one in found)
        try:
            if self.me == 0:
                if self._sending is not None and self._sending[0] is plane:
                    self._sending[1].wait()
                self._space = _joined(found)
                self._sending = plane, plane.post([Parcel(self._space, to, BUFFERS)], ())[0]
                return
            if plane.reads_in_place(0):
                piece = plane.next_piece(0, BUFFERS)
                arrived = piece.read(torch.uint8).clone()
                piece.release()
            else:
                arrived = torch.empty(size, dtype=torch.uint8)
                plane.post((), [Parcel(arrived, 0, BUFFERS)])[0].wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.me} lost a peer while buffers were passed: {error}") from error
        self._kept = {at: one for at, one in self._kept.items() if at == round_ - 1} | {round_: arrived}

    # ---- the exchange --------------------------------------------------------------------------------------------

    def exchange(self, summing: ScheduleAllReduce, round_: int, tuning: State, *, lacks: bool) -> State:
        """Give or take the state at the start of the step whose backward is round `round_`; every rank calls it.

        Args:
            summing: the backend.
            round_: its number.
            tuning: the progress of this rank's choice of a bucket size, before the round.
            lacks: this rank takes the state.

        Returns:
            the progress of that choice, on a rank that takes the state; else an empty one.

        Raises:
            PeerLost: a rank is lost.
        """
        step = -1 if lacks else self._step()
        every = compare(summing, self.me, [int(lacks), step, int(not lacks and self._may_give_zero(step, round_))])
        zero_lacks = bool(every[0][0])
        able = [rank for rank, (no, at, zero) in enumerate(every) if not no and at >= 0 and (zero or not zero_lacks)]
        if not zero_lacks:
            able = [rank for rank in able if rank == 0]
        if not able:
            self.refuse(
                "a step of this script has several backward passes, or the script uses torch.distributed itself"
                if not zero_lacks or all(at < 0 for _, at, _ in every)
                else "only worker/0 had its objects of run.track, its own random numbers or its buffers"
            )
        if self.me == able[0]:
            self._give(summing, step, round_, tuning, zero_lacks=zero_lacks)
            return {}
        return self._receive(summing, able[0], takes=lacks)

    def _step(self) -> int:
        """Return the step after which the one in progress began; -1 where this rank has no state of that moment."""
        used = dist.is_available() and dist.is_initialized()
        return -1 if used or self._noted is None or self._noted[0] != self._ended else self._ended

    def _may_give_zero(self, step: int, round_: int) -> bool:
        """Whether this rank can give the state of a lost rank 0."""
        if step < 0 or self._noted is None or has_own_state(self._noted[1]()):
            return False
        return not self._buffers() or round_ - 1 in self._kept

    def _give(
        self, summing: ScheduleAllReduce, step: int, round_: int, tuning: State, *, zero_lacks: bool
    ) -> None:  # fmt: skip
        assert self._noted is not None, "else it is not able"
        plain, tensors = self._parts.optimizer_state()
        state = self._noted[1]()
        if zero_lacks and self._buffers():
            state = with_buffers(state, _parted(self._kept[round_ - 1], self._parts.buffers()))
        values = {f"param/{name}": one for name, one in self._parts.parameters().items()} | tensors
        flat = [one.detach().cpu().contiguous().view(-1).view(torch.uint8) for one in values.values()]
        shapes = [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in values.items()]
        header = msgspec.msgpack.encode(StateHeader(step, plain, state, tuning, shapes))
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        sizes = [head.numel(), sum(one.numel() for one in flat)]
        compare(summing, self.me, sizes)
        pass_on(summing, sizes[0], [head], None)
        pass_on(summing, sizes[1], flat, None)

    def _receive(self, summing: ScheduleAllReduce, giver: int, *, takes: bool) -> State:
        first, rest = compare(summing, self.me, [0, 0])[giver]
        head = torch.empty(first if takes else 0, dtype=torch.uint8)
        pass_on(summing, first, None, [head] if takes else None)
        if not takes:
            pass_on(summing, rest, None, None)
            return {}
        header = msgspec.msgpack.decode(head.numpy().tobytes(), type=StateHeader)
        tensors = {name: torch.empty(shape, dtype=torch_dtype(dtype)) for name, dtype, shape in header.tensors}
        pass_on(summing, rest, None, [one.view(-1).view(torch.uint8) for one in tensors.values()])
        self._parts.load_values(tensors, [name for name in tensors if name.startswith("param/")])
        self._parts.load_optimizer(
            header.optimizer, {name: one for name, one in tensors.items() if name.startswith("optim/")}
        )
        self.taken = header.step, header.rank_state
        self._ended = header.step
        return header.tuning


def keeper(schedule: Schedule, hosts: Sequence[int]) -> int:
    """Return the rank that keeps rank 0's buffers: a partner of rank 0, on another host if there is one."""
    others = partners(schedule, 0)
    return min(others, key=lambda rank: (bool(hosts) and hosts[rank] == hosts[0], rank))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.uint8)


def _parted(joined: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ends = list(itertools.accumulate(one.nbytes for one in like.values()))
    return {
        name: joined[end - one.nbytes : end].clone().view(one.dtype).view(one.shape)
        for (name, one), end in zip(like.items(), ends, strict=True)
    }
