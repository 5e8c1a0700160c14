"""What must always be true, checked while a run goes and after it; fails by raising Broken, which names the invariant.

sums        every version that a worker reads, and the last, equals the undisturbed run's to the bit: no push lost,
            none twice, a host's ranks added first and in their order, numbers of the right clock; under staleness it
            equals what follows from the gradients that were pushed
versions    a value that was read holds what it must: version c at clock c
buffers     what a push carries does not change between its first and its last copy (a gradient overwritten before
            its acknowledgement would); what is pushed for several workers of a host is their sum
staleness   nobody begins a clock more than s ahead of the slowest
examples    every position of every epoch is taken once
finite      nothing grows with the number of clocks
aside       who joins in mid-run is given what was left beside at its first clock
hangs       the run ends within simulated time; else who waits for whom is said

What DESIGN.md says must always be true, and where it is held:

    sums are right                  sums, versions (here); the tolerance of float64 and of other N: tests/sync
    exactly once                    sums, once (asp: every push is a digit of its own), lost
    when an update is applied       versions, staleness
    values change only between      versions: what a worker reads at a clock is whole, of one version; torch's hooks are
    steps                           not here, but in tests/worker/test_prepare.py
    every example once an epoch     examples
    a death is cut consistently     replay, sums; "inconsistent" must end in a restart and not in wrong values
    seen in time                    hangs, ends; the seconds themselves: tests/whole (make soak)
    membership changes move little  tests/job/test_assignment.py
    a checkpoint is whole or absent sums after a restart (a mixture of versions shows); files: tests/checkpoint
    nothing hangs                   hangs: every task says what it waits for, and for whom
    nothing is left behind          finite, one primary, replicas; processes and ports: tests/whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.shard_state import ShardState
from psctl.ps.messages import Push
from psctl.ps.pieces import bytes_view
from psctl.types import Member, Shard
from tests.simulation.kernel import Broken
from tests.simulation.model import Script, Truth, by_host, clock_of, taken, undisturbed
from tests.simulation.scenario import Scenario

Drawn = tuple[int, tuple[int, ...]]
"""Epoch, and positions in its order."""

NEAR = 1e-9
"""Relative; a sum of weights that differs from the number of workers by rounding only."""

LOOKED = 4
"""One of so many short runs has its memory looked through."""

LONG = 10
"""Clocks from which on every run has: only there something can have grown."""


class Oracle:
    """The judge of one run."""

    def __init__(self, scenario: Scenario, script: Script) -> None:
        self._scenario, self._script = scenario, script
        followed = scenario.staleness != 0 or scenario.follows
        self._truth = Truth(script, scenario.groups) if followed else undisturbed(scenario.spec, scenario.groups)
        self._shares: dict[tuple[int, int], float] = {}  # (rank, clock) -> weight
        self.covered = 0  # pushes for several workers that were seen
        self._waiting: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}  # clock -> rank -> gradient, weight
        self._taken: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}  # those that the truth holds
        self._reached = dict.fromkeys(range(scenario.spec.world), -1)  # newest clock that a rank has pushed from
        self._drew: dict[tuple[int, int], Drawn] = {}  # (rank, clock) -> epoch, positions
        self._consumed: set[tuple[int, int]] = set()
        self._members: list[tuple[int, list[int]]] = []  # (first clock, ranks)
        self._steps: dict[int, int] = {}
        self._pushed: dict[tuple[int, int, int], bytes] = {}  # (rank, incarnation, clock) -> the gradient's bytes
        self._drawn: dict[tuple[int, int, int], Drawn] = {}  # the same -> the examples
        self.shards: Sequence[Shard] = ()
        self.checked = 0

    # ---- while it goes ---------------------------------------------------------------------------------------------

    def read(self, rank: int, clock: int, machine: DenseClient, shards: Sequence[int]) -> None:
        """A worker reads these shards at a clock."""
        for index in shards:
            shard = machine.shards[index]
            got = _bytes(machine.front[shard.dtype], shard)
            version = machine.front_version([index])
            if machine.terms.staleness is None:
                self._count(rank, clock, shard, version - machine.terms.base, got)
                continue
            if version < clock - machine.terms.staleness:
                raise Broken("versions", f"worker/{rank} reads version {version} of shard {index} at clock {clock}")
            if got != _bytes(self._expected(version, clock), shard):
                raise Broken("sums", f"worker/{rank} reads wrong values of shard {index}, version {version}")
            self.checked += 1

    def _expected(self, version: int, clock: int) -> torch.Tensor:
        if self._scenario.follows:
            self._advance(version)
        if version >= len(self._truth.versions):
            raise Broken("versions", f"version {version} was read when not all had pushed clock {version - 1}")
        if self._scenario.update == "worker" and version > 0:
            return self._truth.means[version - 1]
        return self._truth.versions[version]

    def _count(self, rank: int, clock: int, shard: Shard, version: int, got: bytes) -> None:
        """asp: the values say which pushes are in them."""
        self.checked += 1
        elements = set(torch.frombuffer(bytearray(got), dtype=torch.float64).tolist())
        if len(elements) > 1:
            raise Broken("sums", f"worker/{rank} reads shard {shard.index} torn: {elements}")
        counts = _digits(-elements.pop()) if elements else []
        self._exactly_once(f"shard {shard.index} as worker/{rank} reads it at clock {clock}", counts)
        world = self._scenario.spec.world
        mine = [index for index in range(rank, clock * world, world) if not (index < len(counts) and counts[index])]
        if mine and elements:
            raise Broken("versions", f"worker/{rank} does not see its own clock {mine[0] // world} at clock {clock}")

    def _exactly_once(self, where: str, counts: Sequence[int]) -> None:
        world = self._scenario.spec.world
        for index, times in enumerate(counts):
            if times > 1:
                raise Broken("once", f"{where}: the push of worker/{index % world} at clock {index // world} is in it "
                             f"{times} times")  # fmt: skip

    def begins(self, rank: int, clock: int) -> None:
        """A worker begins to compute a clock."""
        slowest = min(self._reached[one] for one in self._ranks(clock))
        if self._scenario.staleness is not None and clock - slowest - 1 > self._scenario.staleness:
            raise Broken("staleness", f"worker/{rank} begins clock {clock} when others have done only {slowest}")

    def members(self, clock: int, ranks: list[int]) -> None:
        """From this clock on only these ranks take part."""
        self._members = [*(one for one in self._members if one[0] < clock), (clock, ranks)]

    def _ranks(self, clock: int) -> list[int]:
        ranks = list(range(self._scenario.spec.world))
        for first, some in self._members:
            ranks = some if first <= clock else ranks
        return ranks

    def computed(self, who: Member, clock: int, gradient: torch.Tensor, share: float, drew: Drawn) -> None:
        """A worker made a gradient of these examples, for the first time or in a replay."""
        self._drew[who.rank, clock] = drew
        self._shares[who.rank, clock] = share
        now = bytes(bytes_view(gradient))
        self._pushed[who.rank, who.incarnation, clock] = now
        self._reached[who.rank] = max(clock, self._reached[who.rank])
        self._drawn[who.rank, who.incarnation, clock] = drew
        older = [(who.rank, one, clock) for one in range(who.incarnation)]
        if self._scenario.deaths == "continue":  # its share may be larger by then
            older = [key for key in older if self._drawn.get(key) == drew]
        before = [self._pushed.get(key, now) for key in older]
        if self._scenario.staleness == 0 and any(each != now for each in before):
            raise Broken("replay", f"worker/{who.rank} made another gradient of clock {clock} than before")
        self._waiting.setdefault(clock, {})[who.rank] = (gradient, share)

    def restarted(self, step: int) -> None:
        """All goes on from a checkpoint of `step`: what came after it is done again."""
        self._drew = {key: drew for key, drew in self._drew.items() if key[1] < step}
        if self._scenario.deaths == "continue":  # other workers may be lost this time, and values differ then
            self._drawn = {key: drew for key, drew in self._drawn.items() if key[2] < step}
        self._consumed = set(self._drew)
        self._members.clear()
        self._reached = dict.fromkeys(self._reached, step - 1)
        self._steps.clear()
        if self._scenario.follows:
            before, self._truth = {**self._taken, **self._waiting}, Truth(self._script, self._scenario.groups)
            self._waiting, self._taken = {}, {}
            for clock in range(step):
                self._take(clock, before[clock])

    def _advance(self, version: int) -> None:
        """Under staleness what training gives depends on what was read: follow it from what was pushed."""
        while (clock := self._truth.clock) < version:
            ranks, there = self._ranks(clock), self._waiting.get(clock, {})
            if not set(ranks) <= there.keys():
                return
            del self._waiting[clock]
            self._take(clock, {rank: there[rank] for rank in ranks})

    def _take(self, clock: int, pushed: dict[int, tuple[torch.Tensor, float]]) -> None:
        world, total = self._scenario.spec.world, 0.0
        for ranks in by_host(self._scenario.groups, pushed):
            together = 0.0
            for rank in ranks:
                together += pushed[rank][1]
            total += together
        self._taken[clock] = pushed
        self._truth.step(pushed, world if total == 0 or abs(total - world) <= NEAR * world else total)

    def sent(self, who: Member, message: Push, payload: bytes) -> None:
        """A push leaves a worker."""
        shard = self.shards[message.shard]
        item = torch.empty(0, dtype=self._script.dtype).element_size()
        start = shard.range.start * item
        self.covered += bool(message.covers)
        whole = (
            self._together(message.covers, message.clock)
            if message.covers
            else (self._pushed[who.rank, who.incarnation, message.clock])
        )
        if payload != whole[start : start + len(payload)]:
            raise Broken("buffers", f"{who} sends bytes of shard {message.shard} that are not clock "
                         f"{message.clock}'s: its buffer was overwritten before the acknowledgement")  # fmt: skip

    def _together(self, ranks: Sequence[int], clock: int) -> bytes:
        """Return the bytes of a host's sum: of what its ranks have made, whichever start of them."""
        made = {rank: data for (rank, _, at), data in self._pushed.items() if at == clock and rank in ranks}
        flat = {rank: torch.frombuffer(bytearray(data), dtype=self._script.dtype) for rank, data in made.items()}
        given = {rank: (flat[rank], self._shares[rank, clock]) for rank in ranks}
        total = torch.zeros_like(self._script.initial)
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            part = self._script.together(clock, index, given)
            if part is not None:
                total[start : start + size] = part
        return bytes(bytes_view(total))

    def consumed(self, rank: int, clock: int) -> None:
        """A worker's part of a clock counts."""
        self._consumed.add((rank, clock))

    def cut(self, rank: int, clock: int) -> None:
        """A worker died; what it pushed up to this clock counts, and what came later does not."""
        self._consumed = {one for one in self._consumed if one[0] != rank or one[1] <= clock}
        self._drew = {one: drew for one, drew in self._drew.items() if one[0] != rank or one[1] <= clock}
        if self._scenario.staleness is None:  # what an earlier cut left out may have been applied since, as its task
            for (who, _, at), drew in sorted(self._drawn.items()):
                if who == rank and at <= clock:
                    self._drew[who, at] = drew
        self._consumed |= {one for one in self._drew if one[0] == rank}
        for later in [each for each in self._waiting if each > clock]:
            self._waiting[later].pop(rank, None)

    def aside(self, rank: int, clock: int, left: int) -> None:
        """A worker that joins in mid-run takes what was left beside at the start of clock `left`."""
        if left != clock:
            raise Broken("aside", f"worker/{rank} is given what was left at clock {left}, for clock {clock}")

    def finished(self, rank: int, steps: int) -> None:
        """A worker's script reached its end."""
        self._steps[rank] = steps

    # ---- after it --------------------------------------------------------------------------------------------------

    def judge(self, machines: Mapping[str, Any], servers: Mapping[int, DenseServer],
              chains: Sequence[Sequence[int]]) -> None:  # fmt: skip
        """Check what can be said only when all is over.

        Args:
            machines: of all processes.
            servers: of those servers that live.
            chains: the newest assignment's.
        """
        spec = self._scenario.spec
        self._servers(servers, chains)
        last = max(self._steps.values(), default=0)
        if self._scenario.deaths == "continue":  # who died after its last clock is missed by nobody
            right = last >= spec.steps and set(self._steps.values()) == {last}
        else:
            right = self._steps == dict.fromkeys(range(spec.world), spec.steps)
        if not right:
            raise Broken("steps", f"workers ended at {self._steps}")
        epochs, rest = clock_of(spec, spec.steps)
        wanted = Counter((epoch, position) for epoch in range(epochs) for position in range(spec.examples))
        for clock in range(spec.steps - rest, spec.steps):
            for rank in range(spec.world):
                epoch, mine, _ = taken(spec, clock, rank)
                wanted.update((epoch, position) for position in mine)
        uncut = {one for one in self._drew if one[0] not in self._steps and one[0] in self._ranks(one[1])}
        consumed: Counter[tuple[int, int]] = Counter()
        for one in self._consumed | uncut:  # a member's clock is in what all have read at the end
            epoch, drew = self._drew[one]
            consumed.update((epoch, position) for position in drew)
        if wanted != consumed:
            raise Broken("examples", f"missing {wanted - consumed}, too many {consumed - wanted}")
        for name, machine in machines.items() if self._scenario.seed % LOOKED == 0 or spec.steps > LONG else ():
            bounded(name, machine, spec.world, len(self.shards))

    def _servers(self, machines: Mapping[int, DenseServer], chains: Sequence[Sequence[int]]) -> None:
        """Servers at the end: the primary has all, once, and what its replicas have is the same to the bit."""
        for shard, chain in zip(self.shards, chains, strict=True):
            if not chain or not set(chain) <= machines.keys():
                continue  # it is being handed over, or one died and that is not known yet, after all had ended
            there = {
                rank: machine.shards[shard.index] for rank, machine in machines.items() if shard.index in machine.shards
            }
            chains = {rank: one for rank, one in there.items() if one.chain.role in ("primary", "member")}
            heads = [rank for rank, one in chains.items() if one.chain.role == "primary"]
            newest = max((chains[rank].chain.epoch for rank in heads), default=-1)
            heads = [rank for rank in heads if chains[rank].chain.epoch == newest]
            if len(heads) != 1:
                raise Broken("one primary", f"shard {shard.index} is led by servers {heads}")
            head = chains[heads[0]]
            self._last(shard, head.state)
            whole = _state(head.state)
            for rank in set(head.chain.members[1:]) & set(chain):  # the last assignment may not be everywhere yet
                other = there.get(rank)
                if other is None or _state(other.state) != whole:
                    raise Broken("replicas", f"server/{rank} has another shard {shard.index} than server/{heads[0]}")

    def _last(self, shard: Shard, state: ShardState) -> None:
        spec = self._scenario.spec
        if self._scenario.staleness is None:
            for element in set(state.values.tolist()):
                counts = _digits(-element)
                self._exactly_once(f"shard {shard.index} at the end", counts)
                if counts != [1] * (spec.world * spec.steps):
                    raise Broken("lost", f"shard {shard.index} ends with these pushes in it: {counts}")
            return
        last = max(self._steps.values(), default=0)
        if state.version != last:
            raise Broken("lost", f"shard {shard.index} ends at version {state.version} of {last}")
        if bytes(bytes_view(state.values)) != _bytes(self._expected(last, last), shard):
            raise Broken("sums", f"shard {shard.index} ends with wrong values")


def _state(state: ShardState) -> tuple[int | None, bytes, bytes]:
    head, data = state.snapshot()
    return state.version, head, bytes(data)


def bounded(name: str, machine: object, world: int, shards: int) -> None:
    """No container of a machine holds more than a few entries a rank and shard."""
    limit = 6 * world * max(1, shards) + 24
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [(name, machine)]
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen or isinstance(thing, str | bytes | int | float | torch.Tensor | torch.optim.Optimizer):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | tuple):
            if len(thing) > limit and not isinstance(thing, tuple):
                raise Broken("finite", f"{path} has {len(thing)} entries")
            inner = thing.items() if isinstance(thing, dict) else enumerate(thing)
            stack += [(f"{path}[{key}]", value) for key, value in inner]
        elif type(thing).__module__.startswith("psctl."):
            stack += [(f"{path}.{key}", value) for key, value in getattr(thing, "__dict__", {}).items()]


def _digits(number: float) -> list[int]:
    """Return the digits of a whole number in base 4, lowest first."""
    found, rest = [], int(number)
    while rest > 0:
        rest, digit = divmod(rest, 4)
        found.append(digit)
    return found


def _bytes(flat: torch.Tensor, shard: Shard) -> bytes:
    return bytes(bytes_view(flat.narrow(0, shard.range.start, len(shard.range))))
