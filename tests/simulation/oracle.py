"""What must always be true, checked while a run goes and after it; fails by raising Broken, which names the invariant.

sums        every version that a worker reads, and the last, equals the undisturbed run's to the bit: no push lost,
            none twice, ranks added in their order, numbers of the right clock; under staleness it
            equals what follows from the gradients that were pushed
versions    a value that was read holds what it must: version c at clock c
buffers     what a push carries does not change between its first and its last copy (a gradient overwritten before
            its acknowledgement would)
staleness   nobody begins a clock more than s ahead of the slowest
examples    every position of every epoch is taken once
finite      nothing grows with the number of clocks
hangs       the run ends within simulated time; else who waits for whom is said
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psctl.store.client import ClientMind
from psctl.store.messages import Push, PushPart
from psctl.store.pieces import bytes_view
from psctl.words import Shard

from .kernel import Broken
from .model import Script, Truth, clock_of, taken, undisturbed
from .scenario import Scenario


class Oracle:
    """The judge of one run."""

    def __init__(self, scenario: Scenario, script: Script) -> None:
        self._scenario, self._script = scenario, script
        self._truth = undisturbed(scenario.spec) if scenario.staleness == 0 else Truth(script)
        self._waiting: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}  # clock -> rank -> gradient, weight
        self._reached = dict.fromkeys(range(scenario.spec.world), -1)  # newest clock that a rank has pushed from
        self._consumed: Counter[tuple[int, int]] = Counter()
        self._steps: dict[int, int] = {}
        self._pushed: dict[tuple[int, int], bytes] = {}  # (rank, clock) -> the gradient's bytes
        self.shards: Sequence[Shard] = ()
        self.checked = 0

    # ---- while it goes ---------------------------------------------------------------------------------------------

    def read(self, rank: int, clock: int, mind: ClientMind, shards: Sequence[int]) -> None:
        """A worker reads these shards at a clock."""
        for index in shards:
            shard = mind.shards[index]
            got = _bytes(mind.landing[shard.dtype], shard)
            version = mind._landings[index].shown
            if version < clock - mind.terms.staleness:
                raise Broken("versions", f"worker/{rank} reads version {version} of shard {index} at clock {clock}")
            if got != _bytes(self._expected(version, clock), shard):
                raise Broken("sums", f"worker/{rank} reads wrong values of shard {index}, version {version}")
            self.checked += 1

    def _expected(self, version: int, clock: int) -> torch.Tensor:
        if self._scenario.staleness:
            self._advance(version)
        if version >= len(self._truth.versions):
            raise Broken("versions", f"version {version} was read when not all had pushed clock {version - 1}")
        if self._scenario.update == "worker" and version > 0:
            return self._truth.means[version - 1]
        return self._truth.versions[version]

    def begins(self, rank: int, clock: int) -> None:
        """A worker begins to compute a clock."""
        slowest = min(self._reached.values())
        if clock - slowest - 1 > self._scenario.staleness:
            raise Broken("staleness", f"worker/{rank} begins clock {clock} when others have done only {slowest}")

    def computed(self, rank: int, clock: int, gradient: torch.Tensor, share: float) -> None:
        """A worker made a gradient, for the first time or in a replay."""
        now = bytes(bytes_view(gradient))
        before = self._pushed.get((rank, clock))
        if before is None:
            self._reached[rank] = clock
            self._pushed[rank, clock] = now
            self._waiting.setdefault(clock, {})[rank] = (gradient, share)
        elif before != now:
            raise Broken("replay", f"worker/{rank} made another gradient of clock {clock} than before")

    def _advance(self, version: int) -> None:
        """Under staleness what training gives depends on what was read: follow it from what was pushed."""
        world = self._scenario.spec.world
        while self._truth.clock < version and len(self._waiting.get(self._truth.clock, ())) == world:
            self._truth.step(self._waiting.pop(self._truth.clock), world)

    def sent(self, rank: int, message: Push | PushPart, payload: bytes) -> None:
        """A part of a push leaves a worker."""
        shard = self.shards[message.shard]
        offset = message.offset if isinstance(message, PushPart) else 0
        item = torch.empty(0, dtype=self._script.dtype).element_size()
        start = shard.range.start * item + offset
        whole = self._pushed[rank, message.clock]
        if payload != whole[start : start + len(payload)]:
            raise Broken("buffers", f"worker/{rank} sends bytes of shard {message.shard} that are not clock "
                         f"{message.clock}'s: its buffer was overwritten before the acknowledgement")  # fmt: skip

    def consumed(self, rank: int, clock: int) -> None:
        """A worker's part of a clock counts."""
        epoch, mine, _ = taken(self._scenario.spec, clock, rank)
        self._consumed.update((epoch, position) for position in mine)

    def finished(self, rank: int, steps: int) -> None:
        """A worker's script reached its end."""
        self._steps[rank] = steps

    # ---- after it --------------------------------------------------------------------------------------------------

    def judge(self, minds: Mapping[str, Any]) -> None:
        """Check what can be said only when all is over."""
        spec = self._scenario.spec
        if self._steps != dict.fromkeys(range(spec.world), spec.steps):
            raise Broken("steps", f"workers ended at {self._steps}")
        epochs, rest = clock_of(spec, spec.steps)
        wanted = Counter((epoch, position) for epoch in range(epochs) for position in range(spec.examples))
        for clock in range(spec.steps - rest, spec.steps):
            for rank in range(spec.world):
                epoch, mine, _ = taken(spec, clock, rank)
                wanted.update((epoch, position) for position in mine)
        if wanted != self._consumed:
            raise Broken("examples", f"missing {wanted - self._consumed}, too many {self._consumed - wanted}")
        for name, mind in minds.items():
            bounded(name, mind, spec.world, len(self.shards))


def bounded(name: str, mind: object, world: int, shards: int) -> None:
    """No container of a mind holds more than a few entries a rank and shard."""
    limit = 6 * world * max(1, shards) + 24
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [(name, mind)]
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


def _bytes(flat: torch.Tensor, shard: Shard) -> bytes:
    return bytes(bytes_view(flat.narrow(0, shard.range.start, len(shard.range))))
