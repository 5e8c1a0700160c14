"""The dependencies of the messages of a schedule.

By the semantics of `schedule/schedule.py` a message may start when

    its sender holds each of its chunks as all earlier steps leave it     (those messages are *done*: reduced)
    both its ends are free on its lane: all that the sender sent and      (*delivered*)
      that the receiver received on that lane in earlier steps has arrived
    its receiver has sent the value that the message will change          (*delivered*)

and a chunk at a node has its value after a step when all that arrived is reduced, and all that the node sent in that
step, which read the value before, is delivered. Where several wait for several, a *join* is put between, done when all
its dependencies are; so the number of edges stays linear in the number of transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.schedule import ScheduleMessage


class MessageDependencies:
    """The graph of dependencies. Numbers below `len(messages)` are messages, those above are joins.

    `need[i]` counts the dependencies of i; `delivered[i]` and `done[i]` list the messages that wait for i to
    arrive, and for i to be done.
    """

    def __init__(self, messages: Sequence[ScheduleMessage]) -> None:
        self.need = [0] * len(messages)
        self.delivered: list[list[int]] = [[] for _ in messages]
        self.done: list[list[int]] = [[] for _ in messages]
        self._held: dict[tuple[int, int], int] = {}  # a chunk at a node -> after which it has its value
        # A chunk at a node -> after which all its readers so far are sent.
        self._all_sent: dict[tuple[int, int], int] = {}
        self._readers: dict[tuple[int, int], list[int]] = {}  # those not yet in _all_sent
        self._lanes: dict[tuple[int, int, bool], int] = {}  # (node, lane, whether it sends) -> the last to use it
        start = 0
        for index in range(1, len(messages) + 1):
            if index == len(messages) or messages[index].step != messages[start].step:
                self._add_step(messages, start, index)
                start = index

    def _add_step(self, messages: Sequence[ScheduleMessage], start: int, stop: int) -> None:
        reads: dict[tuple[int, int], list[int]] = {}
        writes: dict[tuple[int, int], list[int]] = {}
        lanes: dict[tuple[int, int, bool], list[int]] = {}
        for index in range(start, stop):
            message = messages[index]
            for lane in ((message.source, message.lane, True), (message.destination, message.lane, False)):
                before = self._lanes.get(lane)
                if before is not None:
                    self._after_arrival(before, index)
                lanes.setdefault(lane, []).append(index)
            for chunk in message.chunks:
                at = (message.source, chunk)
                held = self._held.get(at)
                if held is not None:
                    self._after(held, index)
                reads.setdefault(at, []).append(index)
                to = (message.destination, chunk)
                if to in self._readers or to in self._all_sent:
                    self._after_leaving(to, index)
                writes.setdefault(to, []).append(index)
        for to, incoming in writes.items():
            leaving = reads.get(to, [])
            held = self._held.get(to)
            if len(incoming) == 1 and not leaving and held is None:
                self._held[to] = incoming[0]
                continue
            join = self._join()
            for index in (*incoming, *(() if held is None else (held,))):
                self._after(index, join)
            for index in leaving:
                self._after_arrival(index, join)
            self._held[to] = join
        for at, readers in reads.items():
            self._readers.setdefault(at, []).extend(readers)
        for lane, users in lanes.items():
            self._lanes[lane] = users[0] if len(users) == 1 else self._arrival_of(users)

    def _after_leaving(self, to: tuple[int, int], index: int) -> None:
        readers = self._readers.pop(to, None)
        gone = self._all_sent.get(to)
        if readers is not None:
            if gone is None and len(readers) == 1:
                self._all_sent[to] = readers[0]
            else:
                self._all_sent[to] = self._arrival_of([*readers, *(() if gone is None else (gone,))])
        self._after_arrival(self._all_sent[to], index)

    def _arrival_of(self, indices: list[int]) -> int:
        join = self._join()
        for index in indices:
            self._after_arrival(index, join)
        return join

    def _join(self) -> int:
        self.need.append(0)
        self.delivered.append([])
        self.done.append([])
        return len(self.need) - 1

    def _after(self, first: int, then: int) -> None:
        self.done[first].append(then)
        self.need[then] += 1

    def _after_arrival(self, first: int, then: int) -> None:
        self.delivered[first].append(then)
        self.need[then] += 1
