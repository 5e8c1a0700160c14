"""A reducer of collectives whose sums continue after a worker was lost: its replacement joins in the middle of a step.

The others keep what the last step needs, nobody starts again, and no step is done twice (the idea: Chen and others,
Rabit: A Reliable Allreduce and Broadcast Interface, 2015).

Order. Every rank sums the same buckets in one order, one after another, and all sums since the start are counted; a
round is one backward. Any rank's result of sum m needs every rank's part of it, and a rank begins sum m
only when it has completed sum m - 1. So the ranks differ by at most one completed sum, and of all results only the last
one may be missing anywhere. It is in the bucket's vector, which is filled again a round later; the last bucket has two
vectors by turns, because the first sum of the next round need not be complete when it is filled.

A loss. The coordinator starts the lost worker again and has all workers connect anew (`ConnectAgain`). On the new data
plane they compare how many sums each has completed; a rank without the last result gets it. A rank that lost a peer in
the middle of a sum takes its own part from `.grad` again, which no sum has written yet. Let R be the round of the first
sum that no rank has completed. The replacement gets the results of R's sums that are complete, and, when every other
rank is in `finish` of round R, the training state of the step that round R belongs to: nobody has stepped the optimizer
since. It does that step as the lost worker did, and contributes to the sums that were not complete. So every sum is of
the same parts as in an undisturbed run, and equal to the bit.

Another division. While `sync.bucket: auto` tries sizes, a round may be divided into other buckets than the one before.
A rank divides anew when it has completed a round, by numbers that were in its last sum (choice_tuner.py); so the ranks
that are in one round divide alike. The last result of the former round is copied then, because a rank may lack it, and
a replacement learns the division from the rank that gives it results, or with the training state.

A further loss at any time, also in the middle of this, begins it again: what was received counts when it is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from psctl.collectives.allreduce_backends import PendingSum, ScheduleAllReduce, compare, pass_on
from psctl.collectives.data_plane import DataPlane
from psctl.errors import PeerLost
from psctl.job.activity import waiting
from psctl.schedule.schedule import Schedule
from psctl.sync.bucket_allreduce import NO_FACTORS, BucketReducer, Chosen
from psctl.sync.bucket_layout import buckets
from psctl.sync.choice_tuner import ELEMENTS, ChoiceTuner
from psctl.sync.linear_factors import LinearFactors
from psctl.sync.replacement_state import ReplacementState
from psctl.types import BUCKET, NO_PEERS, PeerBytes, sum_of_bytes

HOST = torch.device("cpu")

ConnectAgain = Callable[[Schedule, DataPlane | None, str], DataPlane]
"""Connects to all workers again, given the former data plane and why it ended."""


class RecoverableReducer(BucketReducer):
    """A reducer over psctl's data plane.

    Args:
        backend: plays the schedule.
        parameters: the trainable ones, in the model's order.
        halves: as `BucketReducer` has it.
        schedule: what is played.
        connect_again: connects this process again.
        state: gives or takes the training state of a replacement.
        factors, size, tuner, on_chosen: as `BucketReducer` has them.
    """

    def __init__(
        self, backend: ScheduleAllReduce, parameters: Sequence[nn.Parameter], halves: torch.dtype | None,
        schedule: Schedule, connect_again: ConnectAgain, state: ReplacementState,
        factors: Mapping[int, LinearFactors] = NO_FACTORS, *, size: int = BUCKET, tuner: ChoiceTuner | None = None,
        on_chosen: Chosen = lambda size, measured: None,
    ) -> None:  # fmt: skip
        super().__init__(None, backend, parameters, halves, factors, size=size, tuner=tuner, on_chosen=on_chosen)
        self._summing, self._schedule, self._connect_again, self._state = backend, schedule, connect_again, state
        self._pending: deque[PendingSum] = deque()  # of the buckets from `_done` on
        self._weights: dict[int, float] = {}  # of the buckets that may be summed
        self._round = 0
        self._base = 0  # sums of all former rounds
        self._done = 0  # buckets of this round whose sums are complete
        self._second = self._second_last()
        self._former_last = self._spare = self._vector_of_last()
        self._lacks_state = False  # this process replaces a lost worker, and has no state yet
        self._owes_state = False  # some process has none
        self._recovering = False
        self._counted: tuple[Mapping[str, PeerBytes], ScheduleAllReduce] = NO_PEERS, backend
        """Bytes of former backends, and the one that counts on; one value for all threads."""

    @property
    def activity(self) -> str:
        return waiting("a worker that is started again") if self._recovering else super().activity

    @property
    def bytes_by_peer(self) -> dict[str, PeerBytes]:
        before, summing = self._counted
        return sum_of_bytes(before, summing.bytes_by_peer)

    def send(self, bucket: int, weight: float) -> None:
        self._weights[bucket] = weight
        self._put(len(self.buckets) - 1)

    def finish(self) -> None:
        assert len(self._weights) == len(self.buckets), "every bucket was sent"
        self._finishing = True
        while self._done < len(self.buckets):
            try:
                if self._owes_state:
                    self._exchange_state()
                self._sum_rest()
            except PeerLost as error:
                self._recover(error)
        self._finishing = False
        self._write_means()
        self._weights.clear()
        self._round, self._base, self._done = self._round + 1, self._base + len(self.buckets), 0
        if self._end_round():
            self._former_last = self._flat[-1].clone()
            self._divide()
            self._spare = self._vector_of_last()
        else:
            self._former_last = self._flat[-1]
            self._flat[-1], self._spare = self._spare, self._flat[-1]

    def take_state(self) -> None:
        """Take the training state from another rank, as the replacement of a lost worker; before the first step."""
        self._lacks_state = True
        try:
            self._catch_up()
        except PeerLost as error:
            self._recover(error)
        while self._lacks_state:
            try:
                self._exchange_state()
            except PeerLost as error:
                self._recover(error)

    def _put(self, end: int) -> None:
        """Begin the sums of the buckets before `end` that were sent, in order."""
        while not self._owes_state and (at := self._done + len(self._pending)) < end and at in self._weights:
            self._fill(at, self._weights[at])
            self._pending.append(self._summing.put(self._flat[at]))

    def _sum_rest(self) -> None:
        last = len(self.buckets) - 1
        self._put(last)
        if self._done + len(self._pending) == last:
            self._state.pass_buffers(self._summing.plane, self._round)
        self._put(last + 1)
        while self._pending:
            self._pending[0].wait()
            self._pending.popleft()
            self._done += 1

    # ---- after a loss --------------------------------------------------------------------------------------------

    def _recover(self, error: PeerLost) -> None:
        """Connect again, and learn what each rank has."""
        self._recovering = True
        if self._tuner is not None:
            self._tuner.forget()
        while True:
            self._count_complete(error.message)
            former, why = self._summing.plane, error.message
            plane = self._connect_again(self._schedule, former, why)
            moved = self.bytes_by_peer
            self._backend = self._summing = ScheduleAllReduce(self._schedule, HOST, plane)
            self._counted = moved, self._summing
            try:
                self._catch_up()
                break
            except PeerLost as again:
                error = again
        self._recovering = False

    def _count_complete(self, reason: str) -> None:
        """End what is in progress, and count the sums that were complete before."""
        self._summing.retire(reason)
        while self._pending:
            try:
                self._pending[0].wait()
            except PeerLost:
                break
            self._pending.popleft()
            self._done += 1
        self._pending.clear()

    def _catch_up(self) -> None:
        """Tell all ranks how many sums are complete here; get the results that this rank lacks."""
        mine = -1 if self._lacks_state else self._base + self._done
        rows = compare(self._summing, self._state.me, [mine, self._round, self._base, len(self.buckets)])
        complete = [row[0] for row in rows]
        newest, lacking = max(complete), min(complete) < 0
        if newest < 0:
            self._state.refuse("every worker was lost at once")
        assert all(each < 0 or each >= newest - 1 for each in complete), f"ranks differ by several sums: {complete}"
        giver = complete.index(newest)
        _, first, base, count = rows[giver]
        if newest == base + count:  # the first sum that no rank has completed begins the next round
            first, base = first + 1, newest
        known, behind = newest - base, mine == newest - 1 and not self._lacks_state
        wanted = known if known and lacking else int(newest - 1 in complete)
        self._pass_results(giver, wanted, behind=behind, all_of_round=bool(known and lacking))
        if self._lacks_state:
            self._round, self._base, self._done = first, base, known
        elif behind:
            self._done += 1
        self._owes_state = lacking

    def _pass_results(self, giver: int, wanted: int, *, behind: bool, all_of_round: bool) -> None:
        """Pass the last results from one rank to those that lack them; every rank calls it.

        Args:
            giver: has them.
            wanted: their number.
            behind: this rank lacks the last one.
            all_of_round: they are all complete ones of a round; a replacement takes them.
        """
        gives = self._state.me == giver
        results = [*self._flat[: self._done]] if self._done else [self._former_last]
        results = results[len(results) - wanted :] if gives else []
        terms = [int(self._measures), self._present_size] if gives else [0, 0]
        sizes = [each.nbytes for each in results] or [0] * wanted
        measures, size, *sizes = compare(self._summing, self._state.me, terms + sizes)[giver]
        takes_all = self._lacks_state and all_of_round
        if takes_all:
            self._divide_as(size, measures=bool(measures))
        for at, nbytes in enumerate(sizes):
            takes = takes_all or (behind and at == wanted - 1)
            into = self._flat[at if takes_all else self._done] if takes else None
            source = [results[at].view(torch.uint8)] if gives else None
            pass_on(self._summing, nbytes, source, [into.view(torch.uint8)] if into is not None else None)

    def _divide_as(self, size: int, *, measures: bool) -> None:
        """Divide the gradients as another rank does."""
        if (size, measures) != (self._present_size, self._measures):
            self._divide(size, measures=measures)
            self._former_last = self._spare = self._vector_of_last()

    def _second_last(self) -> torch.Tensor:
        """Return memory for a second vector of the last bucket, of whatever division."""
        sizes = self._tuner.choices if self._tuner is not None and self._tuner.measures else [self._present_size]
        most = 0
        for size in sizes:
            divided = buckets(self._parameters, size=size, apart=self._factors)
            length, dtype, _ = self._vector(divided, len(divided) - 1)
            most = max(most, (length + ELEMENTS) * dtype.itemsize)
        return self._backend.buffer(most, torch.uint8, HOST)

    def _vector_of_last(self) -> torch.Tensor:
        """Return the second vector of the last bucket in the present division."""
        last = self._flat[-1]
        return self._second[: last.nbytes].view(last.dtype)

    def _exchange_state(self) -> None:
        found = self._state.exchange(self._summing, self._round, self.tuning, lacks=self._lacks_state)
        if self._lacks_state and self._tuner is not None and found:
            self._tuner.load(found)
            self._divide_as(self._tuner.choice, measures=self._tuner.measures)
        self._owes_state = self._lacks_state = False
