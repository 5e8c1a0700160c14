"""The collectives of a training script: what each rank gives, how it moves, and what each rank gets.

A call is described and compared on all ranks of its group (`call_agreement`). Then a proven schedule of the group's
size is played on one vector, whose chunks are the ranks' values, and the result is copied out. The algorithm is the
plan's choice for the collective and the size. Moves carry bytes of any type. Reductions join values in an order that
the schedule fixes, so a result has the same bits on every rank and in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NoReturn

import torch

from psctl.collectives import call_agreement, payloads, reduce_operations
from psctl.collectives.call_agreement import CallDescription, GroupsDiffer
from psctl.collectives.channel import Channel
from psctl.collectives.collective_links import CollectiveLinks
from psctl.collectives.group_channel import GroupChannel
from psctl.collectives.payloads import NOTHING, OBJECT, TENSOR, Payload
from psctl.collectives.player import SchedulePlayer
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.errors import ConnectionFailed, PeerLost, UsageError
from psctl.job.activity import waiting
from psctl.schedule.algorithms import catalog, collectives
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.contracts import Collective
from psctl.schedule.groups import Group
from psctl.schedule.schedule import Schedule

PLAYERS = 64
"""Players that are kept, of the last collectives, groups and algorithms."""

DOUBLING = "recursive-doubling"
"""Algorithms of this name pass chunks on that are neither from this rank nor for it."""

Ranges = Sequence[tuple[int, int]]

Choose = Callable[[Collective, int, int], tuple[str, ScheduleOptions]]
"""Returns the algorithm and its options for a collective, the bytes of its vector, and the number of ranks."""

GIVE_RANKS = "give the group's ranks, such as group=[0, 2], on its members only and on each the same"

GroupLike = Group | Sequence[int] | None


class GroupCollectives:
    """The collectives of one rank. One call at a time; calls of several threads wait for each other.

    Args:
        me: this rank.
        world: number of ranks.
        connect: connects to all ranks; called at the first collective.
        choose: chooses algorithms; known after `connect`.
    """

    def __init__(self, me: int, world: int, connect: Callable[[], CollectiveLinks], choose: Choose) -> None:
        self._me = me
        self.world = world
        """Number of ranks of the job."""
        self._connect, self._choose = connect, choose
        self._links: CollectiveLinks | None = None
        self._lock = threading.RLock()
        self._players: dict[tuple[object, ...], SchedulePlayer] = {}
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._call = ""
        self._ended: ConnectionFailed | UsageError | None = None

    @property
    def activity(self) -> str:
        """The wait that this rank is in, for people; "" when it is in none."""
        call, links = self._call, self._links
        if not call:
            return ""
        return waiting(call, links.channel.waits_for if links is not None else ())

    def close(self, *, failed: bool) -> None:
        """Release connections; `failed`: at once, with the peers' waits."""
        if self._links is not None and self._ended is None:
            if failed:
                self._links.end("its script has failed")
            else:
                self._links.close()

    # ---- the collectives -----------------------------------------------------------------------------------------

    def barrier(self, group: GroupLike) -> None:
        """Return when all ranks of the group have called it."""
        with self._begin("run.barrier", group) as call:
            call.agree(Payload(NOTHING), ())

    def all_reduce(self, value: object, operation: str, group: GroupLike, name: str = "") -> object:
        """Combine values of all ranks; on every rank. `name` is the call's for people, if not that of the script."""
        return self._reduction("all-reduce", value, operation, None, group, name)

    def reduce(self, value: object, operation: str, root: int, group: GroupLike) -> object:
        """Combine values of all ranks; on the root."""
        return self._reduction("reduce", value, operation, root, group)

    def _reduction(
        self, collective: Collective, value: object, operation: str, root: int | None, group: GroupLike,
        name: str = "",
    ) -> object:  # fmt: skip
        with self._begin(name or _method(collective), group, root, operation) as call:
            single = payloads.number(value)
            tensor = single if single is not None else value
            payload = payloads.payload_of(tensor)
            writes = root is None or call.me == call.root
            if payload.kind == OBJECT and not payload.problem:
                payload.problem = f"its value is {_type(value)}; expected a tensor, an int or a float"
            if payload.kind == TENSOR and not payload.problem:
                payload.problem = reduce_operations.why_not(operation, payload.dtype)
                if writes:
                    payload.problem = payload.problem or _why_not_written(payload)
            call.agree(payload, ("root", "operation", "kind", "place", "dtype", "shapes"))
            target = payload.tensors[0]
            total = call.joined(collective, [target], None)
            if not writes:
                return None
            reduce_operations.finish(operation, total, call.size)
            with torch.no_grad():
                target.copy_(total.view(target.shape))
            return target.item() if single is not None else value

    def broadcast(self, value: object, root: int, group: GroupLike) -> object:
        """Give the root's value to every rank: into the tensor that each gave, or as a plain value."""
        with self._begin("run.broadcast", group, root) as call:
            gives = call.me == call.root
            payload = payloads.payload_of(value)
            if not gives and payload.kind == OBJECT:
                payload = Payload(OBJECT)  # a rank that gets gives nothing
            elif not gives:
                payload.problem = payload.problem or _why_not_written(payload)
            calls = call.agree(payload, ("root", "kind", "place"))
            source = calls[call.ranks[call.root]]
            if source.kind == TENSOR:
                call_agreement.check(calls, ("dtype", "shapes"))
            else:
                payload = payload if gives else _blank(source)
            whole = payload.tensors[0]
            found = call.moved("broadcast", [whole if gives else None], _sizes(source), whole)
            if source.kind == OBJECT:
                return payloads.decode(found[0])
            if not gives:
                with torch.no_grad():
                    whole.copy_(found[0].view(whole.dtype).view(whole.shape))
            return value

    def all_gather(self, value: object, group: GroupLike) -> list[object]:
        """Give every rank's value to every rank, in the order of the group."""
        found = self._gathering("all-gather", value, None, group)
        assert found is not None, "every rank gets them"
        return found

    def gather(self, value: object, root: int, group: GroupLike) -> list[object] | None:
        """Give every rank's value to the root, in the order of the group."""
        return self._gathering("gather", value, root, group)

    def _gathering(
        self, collective: Collective, value: object, root: int | None, group: GroupLike
    ) -> list[object] | None:
        with self._begin(_method(collective), group, root) as call:
            payload = payloads.payload_of(value)
            calls = call.agree(payload, ("root", "kind", "place", "dtype"))
            each = [calls[rank] for rank in call.ranks]
            sizes = [size for one in each for size in _sizes(one)]
            mine: list[torch.Tensor | None] = [None] * call.size
            mine[call.me] = payload.tensors[0]
            gets = root is None or call.me == call.root
            found = call.moved(collective, mine, sizes, payload.tensors[0], wanted=range(call.size) if gets else ())
            return (
                [_value(part, payload, one.shapes[0]) for part, one in zip(found, each, strict=True)] if gets else None
            )

    def scatter(self, values: object, root: int, group: GroupLike) -> object:
        """Give each rank its value of the root's list."""
        with self._begin("run.scatter", group, root) as call:
            gives = call.me == call.root
            payload = payloads.payload_of_each(values, call.size) if gives else Payload(NOTHING)
            source = call.agree(payload, ("root",))[call.ranks[call.root]]
            like = payload if gives else _blank(source, call.device(source.place))
            given = list(payload.tensors) if gives else [None] * call.size
            found = call.moved("scatter", given, _sizes(source), like.tensors[call.me], wanted=(call.me,))
            return _value(found[0], like, source.shapes[call.me])

    def reduce_scatter(self, values: object, operation: str, group: GroupLike) -> torch.Tensor:
        """Combine the ranks' lists place by place, and give each rank its place of the result."""
        with self._begin("run.reduce_scatter", group, None, operation) as call:
            payload = payloads.payload_of_each(values, call.size)
            if payload.kind == OBJECT and not payload.problem:
                payload.problem = "its values are no tensors"
            payload.problem = payload.problem or reduce_operations.why_not(operation, payload.dtype)
            call.agree(payload, ("operation", "kind", "place", "dtype", "shapes"))
            total = call.joined("reduce-scatter", payload.tensors, call.me)
            reduce_operations.finish(operation, total, call.size)
            return total.view(payload.tensors[call.me].shape)

    def all_to_all(self, values: object, group: GroupLike) -> list[object]:
        """Give each rank its value of every rank's list, in the order of the group."""
        with self._begin("run.all_to_all", group) as call:
            payload = payloads.payload_of_each(values, call.size)
            calls = call.agree(payload, ("kind", "place", "dtype"))
            each, count = [calls[rank] for rank in call.ranks], call.size
            sizes = [size for one in each for size in _sizes(one)]
            given: list[torch.Tensor | None] = [None] * count**2
            given[call.me * count : (call.me + 1) * count] = payload.tensors
            wanted = [source * count + call.me for source in range(count)]
            found = call.moved("all-to-all", given, sizes, payload.tensors[0], wanted=wanted)
            return [_value(part, payload, one.shapes[call.me]) for part, one in zip(found, each, strict=True)]

    # ---- a call --------------------------------------------------------------------------------------------------

    @contextmanager
    def _begin(self, name: str, group: GroupLike, root: int | None = None, operation: str = "") -> Iterator[_Call]:
        """Begin a call; its waits are this rank's activity, and its errors name it."""
        with self._lock:
            if self._ended is not None:
                raise type(self._ended)(self._ended.message, self._ended.hint)
            self._call = name
            try:
                ranks = self._ranks(name, group)
                if self._links is None and len(ranks) > 1:
                    self._links = self._connect()
                yield _Call(self, name, ranks, root, operation)
            except GroupsDiffer as error:
                self._end(error)
            except PeerLost as error:
                self._end(self._lost(name, error))
            finally:
                self._call = ""

    def _ranks(self, name: str, group: GroupLike) -> tuple[int, ...]:
        """Return the ranks of a group.

        Raises:
            GroupsDiffer: it is none, or this rank is no member; on all ranks, for some may wait for this one.
        """
        if group is None:
            return tuple(range(self.world))
        try:
            ranks = group.ranks if isinstance(group, Group) else Group(tuple(group)).ranks
            beyond = [rank for rank in ranks if rank >= self.world]
            why = f"the job has ranks 0 to {self.world - 1}" if beyond else "of which it is no member"
        except (TypeError, ValueError) as error:
            ranks, why = (), str(error)
            beyond = []
        if beyond or self._me not in ranks:
            if self._links is None and self.world > 1:
                self._links = self._connect()
            given = f"rank {self._me} called {name} with group {group!r:.60}"
            raise GroupsDiffer(f"{call_agreement.DIFFERENT_GROUPS}: {given}: {why}", GIVE_RANKS)
        return ranks

    def _lost(self, name: str, error: PeerLost) -> ConnectionFailed | UsageError:
        text = error.message
        if self._links is not None and (why := self._links.why_ended()):
            text = f"{text}: {why}"
        if call_agreement.DIFFERENT_GROUPS in text:
            why = text[text.index(call_agreement.DIFFERENT_GROUPS) :].strip()
            return GroupsDiffer(why, GIVE_RANKS)
        return PeerLost(f"{name}: a rank was lost: {text}", "the rank that ended first is named by psctl status")

    def _end(self, error: ConnectionFailed | UsageError) -> NoReturn:
        self._ended = error
        if self._links is not None:
            self._links.end(error.message)
        raise error

    # ---- for calls -----------------------------------------------------------------------------------------------

    @property
    def links(self) -> CollectiveLinks:
        """The connections; there are some."""
        assert self._links is not None, "connected when a call with peers begins"
        return self._links

    def player(
        self, collective: Collective, ranks: tuple[int, ...], root: int, size: int, *, on_gpus: bool
    ) -> tuple[SchedulePlayer, bool]:
        """Return the player of a collective among these ranks, and whether its vector lies on the GPUs."""
        algorithm, options = self._choose(collective, size, len(ranks))
        on_gpus = on_gpus and self.links.gpu_channel is not None
        key = (collective, algorithm, options, root, ranks, on_gpus)
        if key not in self._players:
            if len(self._players) == PLAYERS:
                self._players.clear()
            if collective == "all-reduce":
                schedule = catalog.build(algorithm, len(ranks), options)
            else:
                schedule = collectives.build(collective, len(ranks), algorithm, root=root, options=options)
            channel: Channel = self.links.channel
            if on_gpus and self.links.gpu_channel is not None:
                channel = self.links.gpu_channel(ranks)
            elif ranks != tuple(range(self.world)):
                channel = GroupChannel(ranks, channel)
            what = _method(collective)
            self._players[key] = SchedulePlayer(schedule, ranks.index(self._me), channel, what=what)
        return self._players[key], on_gpus

    @property
    def me(self) -> int:
        """This rank."""
        return self._me


class _Call:
    """One call of a collective; ranks are places in the group but where they are said to be of the job."""

    def __init__(
        self, owner: GroupCollectives, name: str, ranks: tuple[int, ...], root: int | None, operation: str
    ) -> None:  # fmt: skip
        self._owner, self._name, self.ranks = owner, name, ranks
        self.size, self.me = len(ranks), ranks.index(owner.me)
        self.root = ranks.index(root) if isinstance(root, int) and root in ranks else 0
        self._operation, self._problem = operation, ""
        self._root = root
        self._on_gpus = False
        if root is not None and (isinstance(root, bool) or not isinstance(root, int) or root not in ranks):
            self._problem = f"root={root!r:.20} is not one of the ranks {list(ranks)}"

    def agree(self, payload: Payload, same: Sequence[str]) -> dict[int, CallDescription]:
        """Compare this call with those of the other ranks; return all calls by rank of the job.

        Raises:
            UsageError: a rank's call is wrong or differs.
        """
        problem = self._problem or payload.problem
        root = self._root if isinstance(self._root, int) else -1
        peers = [rank for rank in self.ranks if rank != self._owner.me]
        mine = CallDescription(
            self._name, self.ranks, root, str(self._operation), payload.kind,
            reduce_operations.name_of(payload.dtype) if payload.tensors else "", payload.shapes, payload.place, problem,
            shares_gpu=bool(peers) and self._owner.links.shares_gpu,
        )  # fmt: skip
        calls = {self._owner.me: mine}
        if peers:
            try:
                calls = call_agreement.exchange(self._owner.links.channel, self._owner.me, peers, mine)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
        call_agreement.check(calls, same)
        self._on_gpus = not any(call.place != "cuda" or call.shares_gpu for call in calls.values())
        return calls

    def device(self, place: str) -> torch.device:
        """Return this rank's device of a kind."""
        return torch.device(place, torch.cuda.current_device()) if place == "cuda" else torch.device("cpu")

    def joined(self, collective: Collective, parts: Sequence[torch.Tensor], wanted: int | None) -> torch.Tensor:
        """Combine the ranks' vectors, each of these parts one after another; return all of it, or the part `wanted`."""
        ranges = list(pairwise([0, *accumulate(part.numel() for part in parts)]))
        first, length = parts[0], ranges[-1][1]
        size = length * first.element_size()
        player, on_gpus = self._player(collective, size)
        start, stop = ranges[wanted] if wanted is not None else (0, length)
        with self._space(size, first.device, on_gpus=on_gpus) as space:
            vector = space.view(first.dtype)
            for part, (low, high) in zip(parts, ranges, strict=True):
                vector[low:high].view(part.shape).copy_(part)
            if player is not None:
                cut = ranges if wanted is not None else player.schedule.ranges(length)
                player.play(vector, VectorChunks(cut, reduce_operations.JOINS[self._operation]))
            return vector[start:stop].to(first.device, copy=True)

    def moved(
        self, collective: Collective, given: Sequence[torch.Tensor | None], sizes: Sequence[int], like: torch.Tensor,
        wanted: Sequence[int] = (0,),
    ) -> list[torch.Tensor]:  # fmt: skip
        """Move the ranks' values; return the bytes of those that are wanted.

        Args:
            collective: one that only moves.
            given: this rank's values, in their places among all; None for others'.
            sizes: bytes of each.
            like: has the device.
            wanted: places.
        """
        player, on_gpus = self._player(collective, sum(sizes))
        places = self._places(player, sizes)
        with self._space(places[-1][1], like.device, on_gpus=on_gpus) as space:
            for part, (low, high) in zip(given, places, strict=True):
                if part is not None and low < high:
                    space[low:high].view(part.dtype).view(part.shape).copy_(part)
            if player is not None:
                whole = collective == "broadcast"  # one value, cut as the algorithm has it; else each is a chunk
                player.play(space, VectorChunks(player.schedule.ranges(len(space)) if whole else places))
            return [space[slice(*places[place])].to(like.device, copy=True) for place in wanted]

    def _places(self, player: SchedulePlayer | None, sizes: Sequence[int]) -> Ranges:
        """Return where each value is in this rank's vector: of an all-to-all without steps between only its own."""
        mine = None
        if player is not None and player.schedule.collective == "all-to-all" and player.schedule.name != DOUBLING:
            mine = {place for other in range(self.size)
                    for place in (self.me * self.size + other, other * self.size + self.me)}  # fmt: skip
        found, at = [], 0
        for place, size in enumerate(sizes):
            held = size if mine is None or place in mine else 0
            found.append((at, at + held))
            at += held
        return found

    def _player(self, collective: Collective, size: int) -> tuple[SchedulePlayer | None, bool]:
        if self.size == 1:
            return None, False
        return self._owner.player(collective, self.ranks, self.root, size, on_gpus=self._on_gpus)

    @contextmanager
    def _space(self, size: int, device: torch.device, *, on_gpus: bool) -> Iterator[torch.Tensor]:
        """Return `size` bytes of memory for a vector."""
        if self.size == 1 or on_gpus:
            yield torch.empty(size, dtype=torch.uint8, device=device)
            return
        space = self._owner.links.space(size)
        yield space[:size]
        self._owner.links.take_back(space)  # not after an error: a peer may still read it


def _method(collective: Collective) -> str:
    """Return the name of a collective in scripts, such as "run.all_reduce"."""
    return f"run.{collective.replace('-', '_')}"


def _sizes(call: CallDescription) -> list[int]:
    """Return the bytes of a rank's values."""
    width = getattr(torch, call.dtype).itemsize if call.dtype else 1
    found = []
    for shape in call.shapes:
        size = width
        for each in shape:
            size *= each
        found.append(size)
    return found


def _why_not_written(payload: Payload) -> str:
    """Return why a result cannot be written into a rank's tensor; "" when it can."""
    if payload.kind != TENSOR or payloads.is_writable(payload.tensors[0]):
        return ""
    return "its tensor holds elements several times (expand); give it contiguous()"


def _blank(call: CallDescription, device: torch.device = torch.device("cpu")) -> Payload:  # noqa: B008
    """Return memory for what another rank gives, without elements: only type and device count."""
    dtype = getattr(torch, call.dtype)
    return Payload(call.kind, [torch.empty(0, dtype=dtype, device=device) for _ in call.shapes])


def _value(data: torch.Tensor, like: Payload, shape: Sequence[int]) -> object:
    """Return a value from its bytes."""
    return payloads.decode(data) if like.kind == OBJECT else data.view(like.dtype).view(tuple(shape))


def _type(value: object) -> str:
    return type(value).__name__
