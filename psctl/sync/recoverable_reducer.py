"""A reducer of collectives whose sums continue after a worker was lost: its replacement joins in the middle of a step.

The others keep what the last step needs, nobody starts again, and no step is done twice (the idea: Chen and others,
Rabit: A Reliable Allreduce and Broadcast Interface, 2015).

Order. Every rank sums the same buckets in one order, one after another: sum number m is bucket m mod K of round
m div K, a round being one backward. Any rank's result of sum m needs every rank's part of it, and a rank begins sum m
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
from psctl.sync.bucket_allreduce import NO_FACTORS, BucketReducer
from psctl.sync.linear_factors import LinearFactors
from psctl.sync.replacement_state import ReplacementState
from psctl.types import NO_PEERS, PeerBytes, sum_of_bytes

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
        factors: as `BucketReducer` has them.
    """

    def __init__(
        self, backend: ScheduleAllReduce, parameters: Sequence[nn.Parameter], halves: torch.dtype | None,
        schedule: Schedule, connect_again: ConnectAgain, state: ReplacementState,
        factors: Mapping[int, LinearFactors] = NO_FACTORS,
    ) -> None:  # fmt: skip
        super().__init__(None, backend, parameters, halves, factors)
        self._summing, self._schedule, self._connect_again, self._state = backend, schedule, connect_again, state
        self._pending: deque[PendingSum] = deque()  # of the buckets from `_done` on
        self._weights: dict[int, float] = {}  # of the buckets that may be summed
        self._round = 0
        self._done = 0  # buckets of this round whose sums are complete
        self._former_last = self._make(len(self.buckets) - 1)
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
        self._flat[-1], self._former_last = self._former_last, self._flat[-1]
        self._weights.clear()
        self._round, self._done = self._round + 1, 0

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
        count = len(self.buckets)
        mine = -1 if self._lacks_state else self._round * count + self._done
        complete = [row[0] for row in compare(self._summing, self._state.me, [mine])]
        newest, lacking = max(complete), min(complete) < 0
        if newest < 0:
            self._state.refuse("every worker was lost at once")
        first, known = divmod(newest, count)  # the round of the first sum that no rank has completed
        behind = newest - 1 in complete
        assert all(each < 0 or each >= newest - 1 for each in complete), f"ranks differ by several sums: {complete}"
        if known and lacking:
            wanted, of_round = list(range(known)), first
        else:
            wanted, of_round = ([(newest - 1) % count] if behind else []), (newest - 1) // count
        for bucket in wanted:
            takes = (self._lacks_state and of_round == first) or (mine == newest - 1 and bucket == (newest - 1) % count)
            gives = self._state.me == complete.index(newest)
            vector = self._result(of_round, bucket) if gives else self._flat[bucket]
            view = [vector.view(torch.uint8)]
            pass_on(self._summing, vector.nbytes, view if gives else None, view if takes else None)
        if self._lacks_state:
            self._round, self._done = first, known
        elif mine == newest - 1 and behind:
            self._done += 1
        self._owes_state = lacking

    def _result(self, of_round: int, bucket: int) -> torch.Tensor:
        return self._flat[bucket] if of_round == self._round else self._former_last

    def _exchange_state(self) -> None:
        self._state.exchange(self._summing, self._round, lacks=self._lacks_state)
        self._owes_state = self._lacks_state = False
