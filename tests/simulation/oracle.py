"""The oracle of a run of the store: invariants that are checked during the run and after it.

A violation raises Violation with the invariant's name:

sums        every version that a worker reads, and the last one, equals the reference to the bit: each push is applied
            once, a host's ranks are added first and in order, with the numbers of that clock. Under staleness the
            reference applies the gradients that were pushed
versions    the values read at clock c are of a version that the consistency model permits
buffers     the bytes of a push are the same whenever it is sent, so no gradient was overwritten before its
            acknowledgement; a push for several workers of a host is their sum
staleness   no worker begins a clock more than s clocks ahead of the slowest
replay      a worker that repeats a clock computes the same gradient
examples    every position of every epoch is drawn once
finite      the size of no container grows with the number of clocks
rank state  a worker that joins during the run receives the state of its first clock
hangs       the run ends within simulated time; else each wait is named

The invariants of DESIGN.md and where they are checked:

    sums are right                  sums, versions (here); the tolerance of float64 and of other N: tests/sync
    exactly once                    sums, once (asp: each push is a digit), lost
    when an update is applied       versions, staleness
    values change only between      versions: a worker reads values of one version at a clock; torch's hooks:
    steps                           tests/worker/test_prepare.py
    every example once an epoch     examples
    a death is cut consistently     replay, sums; "inconsistent" must end in a restart and not in wrong values
    seen in time                    hangs, ends; the number of seconds: tests/whole (make soak)
    membership changes move little  tests/coordinator/test_assignment.py
    a checkpoint is whole or absent sums after a restart (a mixture of versions differs); files: tests/checkpoint
    nothing hangs                   hangs
    nothing is left behind          finite, one primary, replicas; processes and ports: tests/whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psctl.coordinator.state.sum_order import Groups
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.shard_state import ShardState
from psctl.ps.messages import Push
from psctl.ps.pieces import bytes_view
from psctl.types import Member, Shard
from tests.simulation.kernel import Violation
from tests.simulation.model import (
    ReferenceTraining,
    Script,
    epoch_and_clock,
    examples_taken,
    group_by_host,
    undisturbed_training,
)
from tests.simulation.scenario import Scenario

Examples = tuple[int, tuple[int, ...]]
"""Epoch, and positions in its order."""

WEIGHT_TOLERANCE = 1e-9
"""Relative difference up to which a sum of weights counts as the number of workers."""

MEMORY_CHECK_INTERVAL = 4
"""In one of so many runs the memory of the state machines is checked."""

LONG_RUN = 10
"""Clocks of a run from which on its memory is always checked."""


class Oracle:
    """Checks one run."""

    def __init__(self, scenario: Scenario, script: Script) -> None:
        self._scenario, self._script = scenario, script
        followed = scenario.staleness != 0 or scenario.depends_on_timing
        self._reference = (
            ReferenceTraining(script, scenario.host_groups)
            if followed
            else undisturbed_training(scenario.spec, scenario.host_groups)
        )
        self._shares: dict[tuple[int, int], float] = {}  # (rank, clock) -> weight
        self._waiting: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}  # clock -> rank -> gradient, weight
        self._taken: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}  # those that the reference contains
        self._reached = dict.fromkeys(range(scenario.spec.world), -1)  # newest clock that a rank has pushed
        self._drawn_now: dict[tuple[int, int], Examples] = {}  # (rank, clock) -> epoch, positions
        self._consumed: set[tuple[int, int]] = set()
        self._members: list[tuple[int, list[int]]] = []  # (first clock, ranks)
        self._world, self._groups = scenario.spec.world, scenario.host_groups
        self._groups_at: dict[int, Groups] = {}  # clock -> the groups that it was summed with
        self._steps: dict[int, int] = {}
        self._pushed: dict[tuple[int, int, int], bytes] = {}  # (rank, incarnation, clock) -> the gradient's bytes
        self._drawn: dict[tuple[int, int, int], Examples] = {}  # (rank, incarnation, clock) -> the examples
        self.shards: Sequence[Shard] = ()
        self.values_checked = 0

    # ---- during the run --------------------------------------------------------------------------------------------

    def on_read(self, rank: int, clock: int, machine: DenseClient, shards: Sequence[int]) -> None:
        """A worker reads these shards at a clock."""
        for index in shards:
            shard = machine.shards[index]
            got = _bytes(machine.front[shard.dtype], shard)
            version = machine.front_version([index])
            if machine.terms.staleness is None:
                self._check_counts(rank, clock, shard, version - machine.terms.base, got)
                continue
            if version < clock - machine.terms.staleness:
                raise Violation("versions", f"worker/{rank} reads version {version} of shard {index} at clock {clock}")
            if got != _bytes(self._expected(version, clock), shard):
                raise Violation("sums", f"worker/{rank} reads wrong values of shard {index}, version {version}")
            self.values_checked += 1

    def _expected(self, version: int, clock: int) -> torch.Tensor:
        if self._scenario.depends_on_timing:
            self._advance_reference(version)
        if version >= len(self._reference.versions):
            raise Violation("versions", f"version {version} was read when not all had pushed clock {version - 1}")
        if self._scenario.update == "worker" and version > 0:
            return self._reference.means[version - 1]
        return self._reference.versions[version]

    def _check_counts(self, rank: int, clock: int, shard: Shard, version: int, got: bytes) -> None:
        """Check under asp which pushes the values contain."""
        self.values_checked += 1
        elements = set(torch.frombuffer(bytearray(got), dtype=torch.float64).tolist())
        if len(elements) > 1:
            raise Violation("sums", f"worker/{rank} reads parts of shard {shard.index} that differ: {elements}")
        counts = _digits_base_4(-elements.pop()) if elements else []
        self._check_once(f"shard {shard.index} as worker/{rank} reads it at clock {clock}", counts)
        world = self._scenario.spec.world
        mine = [index for index in range(rank, clock * world, world) if not (index < len(counts) and counts[index])]
        if mine and elements:
            raise Violation("versions", f"worker/{rank} does not see its own clock {mine[0] // world} at clock {clock}")

    def _check_once(self, where: str, counts: Sequence[int]) -> None:
        world = self._scenario.spec.world
        for index, times in enumerate(counts):
            if times > 1:
                push = f"the push of worker/{index % world} at clock {index // world}"
                raise Violation("once", f"{where}: {push} is applied {times} times")

    def on_clock_started(self, rank: int, clock: int) -> None:
        """A worker starts to compute a clock."""
        slowest = min(self._reached.get(one, clock - 1) for one in self._ranks(clock))
        if self._scenario.staleness is not None and clock - slowest - 1 > self._scenario.staleness:
            raise Violation("staleness", f"worker/{rank} begins clock {clock} when others have done only {slowest}")

    def on_members(self, clock: int, ranks: list[int]) -> None:
        """From this clock on these ranks take part."""
        if (clock, ranks) not in self._members:  # else another server receives it
            for rank in set(ranks) - set(self._ranks(clock - 1)):
                self._reached[rank] = max(clock - 1, self._reached.get(rank, -1))
        self._members = [*(one for one in self._members if one[0] < clock), (clock, ranks)]

    def on_start(self, world: int, groups: Groups) -> None:
        """All processes, or one that joins, receive the decision: so many workers began together, with these groups."""
        self._world, self._groups = world, groups

    def _ranks(self, clock: int) -> list[int]:
        ranks = list(range(self._world))
        for first, some in self._members:
            ranks = some if first <= clock else ranks
        return ranks

    def on_gradient(self, member: Member, clock: int, gradient: torch.Tensor, share: float, examples: Examples) -> None:
        """A worker has computed the gradient of these examples, for the first time or again."""
        self._drawn_now[member.rank, clock] = examples
        self._shares[member.rank, clock] = share
        now = bytes(bytes_view(gradient))
        self._pushed[member.rank, member.incarnation, clock] = now
        self._reached[member.rank] = max(clock, self._reached.get(member.rank, -1))
        self._drawn[member.rank, member.incarnation, clock] = examples
        older = [(member.rank, one, clock) for one in range(member.incarnation)]
        if self._scenario.divides:  # its share may have changed
            older = [key for key in older if self._drawn.get(key) == examples]
        before = [self._pushed.get(key, now) for key in older]
        if self._scenario.staleness == 0 and any(each != now for each in before):
            raise Violation("replay", f"worker/{member.rank} made another gradient of clock {clock} than before")
        self._waiting.setdefault(clock, {})[member.rank] = (gradient, share)

    def on_restart(self, step: int) -> None:
        """The job continues from a checkpoint of `step`; later clocks are repeated."""
        self._drawn_now = {key: examples for key, examples in self._drawn_now.items() if key[1] < step}
        if self._scenario.divides:  # others may take part now
            self._drawn = {key: examples for key, examples in self._drawn.items() if key[2] < step}
        self._consumed = set(self._drawn_now)
        self._members.clear()
        self._groups_at = {clock: groups for clock, groups in self._groups_at.items() if clock < step}
        self._reached = dict.fromkeys(self._reached, step - 1)
        self._steps.clear()
        if self._scenario.depends_on_timing:
            before, self._reference = (
                {**self._taken, **self._waiting},
                ReferenceTraining(self._script, self._scenario.host_groups),
            )
            self._waiting, self._taken = {}, {}
            for clock in range(step):
                self._step_reference(clock, before[clock])

    def _advance_reference(self, version: int) -> None:
        """Apply pushed gradients to the reference up to a version: under staleness they depend on the values read."""
        while (clock := self._reference.clock) < version:
            ranks, there = self._ranks(clock), self._waiting.get(clock, {})
            if not set(ranks) <= there.keys():
                return
            del self._waiting[clock]
            self._step_reference(clock, {rank: there[rank] for rank in ranks})

    def _step_reference(self, clock: int, pushed: dict[int, tuple[torch.Tensor, float]]) -> None:
        world, total = len(pushed), 0.0
        groups = self._groups_at.setdefault(clock, self._groups)
        for ranks in group_by_host(groups, pushed):
            together = 0.0
            for rank in ranks:
                together += pushed[rank][1]
            total += together
        self._taken[clock] = pushed
        self._reference.hosts = groups
        self._reference.step(pushed, world if total == 0 or abs(total - world) <= WEIGHT_TOLERANCE * world else total)

    def on_push_sent(self, member: Member, message: Push, payload: bytes) -> None:
        """A push is sent for the first time or again."""
        shard = self.shards[message.shard]
        item = torch.empty(0, dtype=self._script.dtype).element_size()
        start = shard.range.start * item
        whole = (
            self._host_sum_of(message.covers, message.clock)
            if message.covers
            else (self._pushed[member.rank, member.incarnation, message.clock])
        )
        if payload != whole[start : start + len(payload)]:
            raise Violation("buffers", f"{member} sends bytes of shard {message.shard} that are not clock "
                         f"{message.clock}'s: its buffer was overwritten before the acknowledgement")  # fmt: skip

    def _host_sum_of(self, ranks: Sequence[int], clock: int) -> bytes:
        """Return the bytes of a host's sum of the gradients of its ranks, of any incarnation."""
        made = {rank: data for (rank, _, at), data in self._pushed.items() if at == clock and rank in ranks}
        flat = {rank: torch.frombuffer(bytearray(data), dtype=self._script.dtype) for rank, data in made.items()}
        given = {rank: (flat[rank], self._shares[rank, clock]) for rank in ranks}
        total = torch.zeros_like(self._script.initial)
        for index, (start, size) in enumerate(zip(self._script.starts, self._script.sizes, strict=True)):
            part = self._script.sum_of_gradients(clock, index, given)
            if part is not None:
                total[start : start + size] = part
        return bytes(bytes_view(total))

    def on_clock_consumed(self, rank: int, clock: int) -> None:
        """A worker's part of a clock is done."""
        self._consumed.add((rank, clock))

    def on_worker_cut(self, rank: int, clock: int) -> None:
        """A worker was lost: its pushes up to this clock count."""
        self._consumed = {one for one in self._consumed if one[0] != rank or one[1] <= clock}
        self._drawn_now = {
            one: examples for one, examples in self._drawn_now.items() if one[0] != rank or one[1] <= clock
        }
        if self._scenario.staleness is None:  # pushes that an earlier cut dropped may have been applied since
            for (other, _, at), examples in sorted(self._drawn.items()):
                if other == rank and at <= clock:
                    self._drawn_now[other, at] = examples
        self._consumed |= {one for one in self._drawn_now if one[0] == rank}
        for later in [each for each in self._waiting if each > clock]:
            self._waiting[later].pop(rank, None)

    def on_rank_state(self, rank: int, clock: int, stored: int) -> None:
        """A worker that joins during the run receives the rank state that was stored for clock `stored`."""
        if stored != clock:
            raise Violation("rank state", f"worker/{rank} receives the state of clock {stored} for clock {clock}")

    def on_finished(self, rank: int, steps: int) -> None:
        """A worker's script has ended."""
        self._steps[rank] = steps

    # ---- after the run ---------------------------------------------------------------------------------------------

    def check_end(self, machines: Mapping[str, Any], servers: Mapping[int, DenseServer],
              chains: Sequence[Sequence[int]]) -> None:  # fmt: skip
        """Check the results of a run that has ended.

        Args:
            machines: the state machines of all processes, by member.
            servers: the state machines of live servers, by rank.
            chains: the newest assignment's chains, by shard.
        """
        spec = self._scenario.spec
        self._check_servers(servers, chains)
        last = max(self._steps.values(), default=0)
        if self._scenario.divides:  # some are not there at the end
            right = last >= spec.steps and set(self._steps.values()) == {last}
        else:
            right = self._steps == dict.fromkeys(range(spec.world), spec.steps)
        if not right:
            raise Violation("steps", f"workers ended at {self._steps}")
        epochs, rest = epoch_and_clock(spec, spec.steps)
        wanted = Counter((epoch, position) for epoch in range(epochs) for position in range(spec.examples))
        for clock in range(spec.steps - rest, spec.steps):
            for rank in range(spec.world):
                epoch, mine, _ = examples_taken(spec, clock, rank)
                wanted.update((epoch, position) for position in mine)
        uncut = {one for one in self._drawn_now if one[0] not in self._steps and one[0] in self._ranks(one[1])}
        consumed: Counter[tuple[int, int]] = Counter()
        for one in self._consumed | uncut:  # a member's clock is in the values that all have read at the end
            epoch, examples = self._drawn_now[one]
            consumed.update((epoch, position) for position in examples)
        if wanted != consumed:
            raise Violation("examples", f"missing {wanted - consumed}, too many {consumed - wanted}")
        for name, machine in (
            machines.items() if self._scenario.seed % MEMORY_CHECK_INTERVAL == 0 or spec.steps > LONG_RUN else ()
        ):
            check_bounded(name, machine, spec.world, len(self.shards))

    def _check_servers(self, machines: Mapping[int, DenseServer], chains: Sequence[Sequence[int]]) -> None:
        """Check that each shard has one primary with all updates, and that replicas equal it to the bit."""
        for shard, chain in zip(self.shards, chains, strict=True):
            if not chain or not set(chain) <= machines.keys():
                continue  # it is being handed over, or a server was lost after the end and not reported yet
            there = {
                rank: machine.shards[shard.index] for rank, machine in machines.items() if shard.index in machine.shards
            }
            holders = {rank: one for rank, one in there.items() if one.chain.role in ("primary", "member")}
            heads = [rank for rank, one in holders.items() if one.chain.role == "primary"]
            newest = max((holders[rank].chain.epoch for rank in heads), default=-1)
            heads = [rank for rank in heads if holders[rank].chain.epoch == newest]
            if len(heads) != 1:
                raise Violation("one primary", f"shard {shard.index} is led by servers {heads}")
            head = holders[heads[0]]
            self._check_last_version(shard, head.state)
            whole = _state(head.state)
            for rank in set(head.chain.members[1:]) & set(chain):  # the last assignment may not have arrived everywhere
                other = there.get(rank)
                if other is None or _state(other.state) != whole:
                    raise Violation("replicas", f"server/{rank} has another shard {shard.index} than server/{heads[0]}")

    def _check_last_version(self, shard: Shard, state: ShardState) -> None:
        spec = self._scenario.spec
        if self._scenario.staleness is None:
            for element in set(state.values.tolist()):
                counts = _digits_base_4(-element)
                self._check_once(f"shard {shard.index} at the end", counts)
                if counts != [1] * (spec.world * spec.steps):
                    raise Violation("lost", f"shard {shard.index} ends with these pushes in it: {counts}")
            return
        last = max(self._steps.values(), default=0)
        if state.version != last:
            raise Violation("lost", f"shard {shard.index} ends at version {state.version} of {last}")
        if bytes(bytes_view(state.values)) != _bytes(self._expected(last, last), shard):
            raise Violation("sums", f"shard {shard.index} ends with wrong values")


def _state(state: ShardState) -> tuple[int | None, bytes, bytes]:
    head, data = state.snapshot()
    return state.version, head, bytes(data)


def check_bounded(name: str, machine: object, world: int, shards: int) -> None:
    """Check that no container of a state machine holds more than a few entries for each rank and shard."""
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
                raise Violation("finite", f"{path} has {len(thing)} entries")
            inner = thing.items() if isinstance(thing, dict) else enumerate(thing)
            stack += [(f"{path}[{key}]", value) for key, value in inner]
        elif type(thing).__module__.startswith("psctl."):
            stack += [(f"{path}.{key}", value) for key, value in getattr(thing, "__dict__", {}).items()]


def _digits_base_4(number: float) -> list[int]:
    """Return the digits of a whole number in base 4, lowest first."""
    found, rest = [], int(number)
    while rest > 0:
        rest, digit = divmod(rest, 4)
        found.append(digit)
    return found


def _bytes(flat: torch.Tensor, shard: Shard) -> bytes:
    return bytes(bytes_view(flat.narrow(0, shard.range.start, len(shard.range))))
