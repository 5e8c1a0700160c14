"""The proof: a schedule is played on sets of contributions and on expressions before anyone may have it.

Every value is followed as two things: the mask of the ranks whose contributions it contains, and the expression that
makes it, as a number. Equal expressions get equal numbers (hash-consing): a rank's own value is a leaf; what is reduced
in one step at one node is a node of its operands in their order, where two operands may change places, for
`a + b == b + a` to the last bit, and more may not. So equal numbers are equal bits, in every dtype.

Refused, with step, rank and chunk: a read of what is not there; a reduction that would count a contribution twice; two
writes in one step of which one would be lost; a transfer to oneself or with a stranger; a result that lacks a
contribution; an all-reduce after which two ranks hold different expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from psctl.errors import PsctlError
from psctl.schedule.promise import Promise, promise
from psctl.schedule.transfer import Collective, Schedule, Transfer


class ScheduleError(PsctlError, ValueError):
    """A schedule does not keep its promise; the fault of who built it, never of a user.

    `step`, `rank` and `chunk` say where; -1 where there is none (a promise broken at the end has the last step).
    """

    def __init__(self, message: str, step: int = -1, rank: int = -1, chunk: int = -1) -> None:
        super().__init__(message, hint="a schedule is built wrong: report this")
        self.step, self.rank, self.chunk = step, rank, chunk


def prove(
    name: str,
    collective: Collective,
    world: int,
    transfers: Iterable[Transfer],
    shares: Sequence[int] = (1,),
    *,
    nodes: int | None = None,
    root: int = 0,
    owners: Sequence[int] = (),
    members: Sequence[int] = (),
    params: Mapping[str, object] | None = None,
) -> Schedule:
    """Return the schedule, proven; the only way to get one.

    Args:
        name: what built it, as users know it.
        collective: what it promises.
        world: number of ranks.
        transfers: what it does, in any order.
        shares: relative size of each chunk, positive whole numbers.
        nodes: ranks and helpers; `world` when there are no helpers.
        root: who gives or gets the whole.
        owners: the rank of each chunk, where chunks are dealt out unevenly.
        members: the ranks that take part; empty for all.
        params: what was chosen, for people.

    Raises:
        ScheduleError: it does not keep its promise.
    """
    if world < 1 or not shares or any(share < 1 for share in shares):
        raise ScheduleError(f"{name}: a world of {world} and shares {list(shares)[:8]} make no schedule")
    try:
        promised = promise(collective, world, len(shares), root, owners or None, nodes, members or None)
    except ValueError as error:
        raise ScheduleError(f"{name}: {error}") from error
    taking_part = () if tuple(members) == tuple(range(world)) else tuple(members)
    schedule = Schedule(
        name, collective, world, promised.nodes, tuple(shares), tuple(sorted(transfers)), root, dict(params or {}),
        tuple(owners), taking_part,
    )  # fmt: skip
    _Play(schedule, promised).run()
    return schedule


class _Play:
    """One run of a schedule on masks and expressions; index of a value: node * chunks + chunk."""

    def __init__(self, schedule: Schedule, promised: Promise) -> None:
        self.schedule, self.promised, self.chunks = schedule, promised, promised.chunks
        size = promised.nodes * promised.chunks
        self.masks, self.terms = [0] * size, [0] * size
        for (node, chunk), mask in promised.first.items():
            self.masks[node * self.chunks + chunk] = mask
            self.terms[node * self.chunks + chunk] = mask.bit_length()  # a leaf: the rank that contributes it, from 1
        self.known: dict[tuple[int, ...], int] = {}

    def run(self) -> None:
        """Play all steps and look at the end."""
        self._check_ends()
        for step, transfers in self.schedule.by_step():
            self._step(step, transfers)
        self._check_promise()
        if self.promised.collective == "all-reduce":
            self._check_bits()

    def _check_ends(self) -> None:
        taking_part = set(self.promised.members) | set(range(self.promised.world, self.promised.nodes))
        for transfer in self.schedule.transfers:
            source, destination = transfer.source, transfer.destination
            if source == destination:
                raise self._error(transfer.step, source, transfer.chunk, "sends to itself")
            if source not in taking_part or destination not in taking_part:
                stranger = source if source not in taking_part else destination
                raise self._error(transfer.step, stranger, transfer.chunk, "takes no part, yet has a transfer")
            if not 0 <= transfer.chunk < self.chunks:
                raise self._error(transfer.step, source, transfer.chunk, f"sends one of only {self.chunks} chunks")
            if transfer.step < 0 or transfer.lane < 0 or transfer.action not in ("copy", "reduce"):
                raise self._error(transfer.step, source, transfer.chunk, f"has a transfer that is none: {transfer}")

    def _step(self, step: int, transfers: Sequence[Transfer]) -> None:
        """Read everything as the step finds it, then write: that is what a step means."""
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
                raise self._error(step, *where, f"is written at once by {senders}: a copy leaves nothing beside it")

    def _reduce(self, step: int, target: int, operands: list[tuple[int, int, int]]) -> None:
        node, chunk = divmod(target, self.chunks)
        if self.masks[target]:
            operands = sorted([*operands, (node, self.masks[target], self.terms[target])])
        joined = 0
        for source, mask, _ in operands:
            if joined & mask and not self.promised.idempotent:
                twice = _names(joined & mask)
                raise self._error(step, node, chunk, f"would count {twice} twice, the second time from {source}")
            joined |= mask
        self.masks[target] = joined
        terms = [term for _, _, term in operands]
        if len(terms) > 1:
            key = tuple(sorted(terms) if len(terms) == 2 else terms)
            # Leaves are 1 .. nodes, so expressions count from there.
            self.terms[target] = self.known.setdefault(key, self.promised.nodes + 1 + len(self.known))
        else:
            self.terms[target] = terms[0]

    def _check_promise(self) -> None:
        last = self.schedule.steps - 1
        for (node, chunk), wanted in self.promised.last.items():
            held = self.masks[node * self.chunks + chunk]
            if held == wanted:
                continue
            raise self._error(last, node, chunk, f"ends wrong: it lacks {_names(wanted & ~held)}")

    def _check_bits(self) -> None:
        members, last = self.promised.members, self.schedule.steps - 1
        for chunk in range(self.chunks):
            first = self.terms[members[0] * self.chunks + chunk]
            for node in members:
                if self.terms[node * self.chunks + chunk] != first:
                    why = f"adds in another order than rank {members[0]}, so their last bits may differ"
                    raise self._error(last, node, chunk, why)

    def _error(self, step: int, node: int, chunk: int, what: str) -> ScheduleError:
        helper = node - self.promised.world if node < self.promised.nodes else -1
        who = f"rank {node}" if helper < 0 else f"helper {helper}"
        where = f"{self.schedule.name} ({self.promised.collective}), step {step}, {who}, chunk {chunk}"
        return ScheduleError(f"{where}: {what}", step, node, chunk)


def _names(mask: int) -> str:
    """Return the ranks in a mask in words."""
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
