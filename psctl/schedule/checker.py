"""The proof: a schedule is executed symbolically, on sets of contributions and expressions, before it is used.

Every value is represented by two things: the mask of the ranks with a contribution in it, and its expression, as a
number. Equal expressions get equal numbers (hash-consing): a rank's own value is a leaf; what is reduced
in one step at one node is a node of its operands in their order; two operands may change places, because
`a + b == b + a` to the last bit, more may not. So equal numbers are equal bits, in every dtype.

Refused, with step, rank and chunk: a read of a chunk that the sender does not hold; a reduction that would count a
contribution twice; two writes in one step of which one would be lost; a transfer to the sender itself or to a node that
takes no part; a result that lacks a contribution; an all-reduce after which two ranks hold different expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from psctl.errors import PsctlError
from psctl.schedule.schedule import Schedule, Transfer

Holdings = dict[tuple[int, int], int]
"""(node, chunk) -> mask of the ranks with a contribution in the value there; a missing key is no value."""


class Contract(msgspec.Struct, frozen=True):
    """The specification of a collective.

    Args:
        collective: its name.
        members: the ranks that take part.
        precondition: what each node holds before.
        postcondition: what must be held after; other chunks may hold anything.
        same_bits: all members must end with the same expression.
    """

    collective: str
    members: tuple[int, ...]
    precondition: Holdings
    postcondition: Holdings
    same_bits: bool = False


class ScheduleError(PsctlError, ValueError):
    """A schedule violates its contract: an error of its builder, never of a user.

    `step`, `rank` and `chunk` are its place; -1 where there is none (the last step for the postcondition).
    """

    def __init__(self, message: str, step: int = -1, rank: int = -1, chunk: int = -1) -> None:
        super().__init__(message, hint="a schedule is built wrong: report this")
        self.step, self.rank, self.chunk = step, rank, chunk


def all_reduce_contract(world: int, chunks: int) -> Contract:
    """Return the contract of an all-reduce: each rank ends with every chunk's sum over all ranks, to the same bits."""
    places = [(rank, chunk) for rank in range(world) for chunk in range(chunks)]
    first = {(rank, chunk): 1 << rank for rank, chunk in places}
    return Contract("all-reduce", tuple(range(world)), first, dict.fromkeys(places, (1 << world) - 1), same_bits=True)


def prove(
    name: str,
    world: int,
    transfers: Iterable[Transfer],
    shares: Sequence[int] = (1,),
    *,
    nodes: int | None = None,
    params: Mapping[str, object] | None = None,
    contract: Contract | None = None,
    root: int = 0,
) -> Schedule:
    """Return the proven schedule of these transfers; the only way to build one.

    Args:
        name: the algorithm's name in job files and output.
        world: number of ranks.
        transfers: in any order.
        shares: relative size of each chunk, positive whole numbers.
        nodes: number of ranks and helpers; `world` when there are no helpers.
        params: the options, for output.
        contract: what it must keep; None: that of an all-reduce.
        root: the rank that gives or gets the whole, where the collective has one.

    Raises:
        ScheduleError: they do not keep the contract.
    """
    if world < 1 or not shares or any(share < 1 for share in shares):
        raise ScheduleError(f"{name}: a world of {world} and shares {list(shares)[:8]} make no schedule")
    count = max(world, nodes or world)
    kept = contract or all_reduce_contract(world, len(shares))
    ordered = tuple(sorted(transfers))
    schedule = Schedule(name, world, count, tuple(shares), ordered, dict(params or {}), kept.collective, root)
    check(schedule, kept)
    return schedule


def check(schedule: Schedule, contract: Contract) -> None:
    """Check that a schedule keeps a contract.

    Raises:
        ScheduleError: it does not; with the step, rank and chunk.
    """
    _SymbolicRun(schedule, contract).run()


class _SymbolicRun:
    """One run of a schedule on masks and expressions; index of a value: node * chunks + chunk."""

    def __init__(self, schedule: Schedule, contract: Contract) -> None:
        self.schedule, self.contract, self.chunks = schedule, contract, len(schedule.shares)
        size = schedule.nodes * self.chunks
        self.masks, self.terms = [0] * size, [0] * size
        for (node, chunk), mask in contract.precondition.items():
            self.masks[node * self.chunks + chunk] = mask
            self.terms[node * self.chunks + chunk] = mask.bit_length()  # a leaf: the rank that contributes it, from 1
        self.known: dict[tuple[int, ...], int] = {}

    def run(self) -> None:
        """Execute all steps and check the postcondition."""
        self._check_ends()
        like = self._like()
        for step, transfers in self.schedule.by_step():
            self._step(step, transfers if like is None else [one for one in transfers if like[one.chunk] == one.chunk])
        if like is not None:
            self._copy_results(like)
        self._check_postcondition()
        if self.contract.same_bits:
            self._check_bits()

    def _like(self) -> list[int] | None:
        """Return for each chunk the first one that has the same transfers in the same order; None where all differ.

        Chunks have nothing to do with each other, so those that begin alike and move alike end alike: most chunks of a
        pipeline need not be executed.
        """
        moves: list[list[Transfer]] = [[] for _ in range(self.chunks)]
        for transfer in self.schedule.transfers:
            moves[transfer.chunk].append(transfer)
        kinds: dict[object, list[int]] = {}
        for chunk, each in enumerate(moves):  # the ends tell most of those apart that differ
            ends = (each[0].source, each[0].destination, each[-1].source, each[-1].destination) if each else ()
            kinds.setdefault((len(each), ends), []).append(chunk)
        like = list(range(self.chunks))
        for some in kinds.values():
            firsts: dict[object, int] = {}
            for chunk in some if len(some) > 1 else ():
                like[chunk] = firsts.setdefault((*self.masks[chunk :: self.chunks], _order(moves[chunk])), chunk)
        return None if like == list(range(self.chunks)) else like

    def _copy_results(self, like: Sequence[int]) -> None:
        for chunk, first in enumerate(like):
            self.masks[chunk :: self.chunks] = self.masks[first :: self.chunks]
            self.terms[chunk :: self.chunks] = self.terms[first :: self.chunks]

    def _check_ends(self) -> None:
        taking_part = set(self.contract.members) | set(range(self.schedule.world, self.schedule.nodes))
        for transfer in self.schedule.transfers:
            source, destination = transfer.source, transfer.destination
            if source == destination:
                raise self._error(transfer.step, source, transfer.chunk, "sends to itself")
            if source not in taking_part or destination not in taking_part:
                other = source if source not in taking_part else destination
                raise self._error(transfer.step, other, transfer.chunk, "takes no part, yet has a transfer")
            if not 0 <= transfer.chunk < self.chunks:
                raise self._error(transfer.step, source, transfer.chunk, f"sends one of only {self.chunks} chunks")
            if transfer.step < 0 or transfer.lane < 0 or transfer.action not in ("copy", "reduce"):
                raise self._error(transfer.step, source, transfer.chunk, f"has a transfer that is none: {transfer}")

    def _step(self, step: int, transfers: Iterable[Transfer]) -> None:
        """Execute one step: read all values as of its start, then write."""
        masks, terms, chunks = self.masks, self.terms, self.chunks
        arrivals: dict[int, list[tuple[int, int, int]]] = {}
        copies: set[int] = set()
        for transfer in transfers:
            source, chunk = transfer.source, transfer.chunk
            place, target = source * chunks + chunk, transfer.destination * chunks + chunk
            if not masks[place]:
                raise self._error(step, source, chunk, "sends what it does not hold")
            if transfer.action == "copy":
                copies.add(target)
            arrivals.setdefault(target, []).append((source, masks[place], terms[place]))
        for target, found in arrivals.items():
            if target not in copies:
                self._reduce(step, target, found)
            elif len(found) == 1:
                masks[target], terms[target] = found[0][1:]
            else:
                senders = ", ".join(str(source) for source, _, _ in found)
                where = divmod(target, chunks)
                raise self._error(step, *where, f"is written at once by {senders}: a copy must be the only write")

    def _reduce(self, step: int, target: int, operands: list[tuple[int, int, int]]) -> None:
        node, chunk = divmod(target, self.chunks)
        if self.masks[target]:
            operands = sorted([*operands, (node, self.masks[target], self.terms[target])])
        reduced = 0
        for source, mask, _ in operands:
            if reduced & mask:
                twice = _names(reduced & mask)
                raise self._error(step, node, chunk, f"would count {twice} twice, the second time from {source}")
            reduced |= mask
        self.masks[target] = reduced
        terms = [term for _, _, term in operands]
        if len(terms) > 1:
            key = tuple(sorted(terms) if len(terms) == 2 else terms)
            # Leaves are 1 .. nodes, so expressions count from there.
            self.terms[target] = self.known.setdefault(key, self.schedule.nodes + 1 + len(self.known))
        else:
            self.terms[target] = terms[0]

    def _check_postcondition(self) -> None:
        last = self.schedule.steps - 1
        for (node, chunk), wanted in self.contract.postcondition.items():
            held = self.masks[node * self.chunks + chunk]
            if held != wanted:
                raise self._error(last, node, chunk, f"ends wrong: it lacks {_names(wanted & ~held)}")

    def _check_bits(self) -> None:
        members, last = self.contract.members, self.schedule.steps - 1
        for chunk in range(self.chunks):
            first = self.terms[members[0] * self.chunks + chunk]
            for node in members:
                if self.terms[node * self.chunks + chunk] != first:
                    why = f"adds in another order than rank {members[0]}, so their last bits may differ"
                    raise self._error(last, node, chunk, why)

    def _error(self, step: int, node: int, chunk: int, what: str) -> ScheduleError:
        helper = node - self.schedule.world if node < self.schedule.nodes else -1
        name = f"rank {node}" if helper < 0 else f"helper {helper}"
        where = f"{self.schedule.name} ({self.contract.collective}), step {step}, {name}, chunk {chunk}"
        return ScheduleError(f"{where}: {what}", step, node, chunk)


def _order(moves: Iterable[Transfer]) -> tuple[tuple[int, int, int, str], ...]:
    """Return a chunk's transfers with its own steps counted from 0, without gaps."""
    steps = groupby(moves, attrgetter("step"))
    return tuple(
        [(at, one.source, one.destination, one.action) for at, (_, found) in enumerate(steps) for one in found]
    )


def _names(mask: int) -> str:
    """Return the ranks in a mask as text."""
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
