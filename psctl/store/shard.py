"""The mind of one shard on its server: pushes and orders in, sums, steps and answers out; it never waits.

Theory. At any time the shard has one version v, which holds the clocks 0 .. v-1. Clock v is under way:

    push of rank r   staged in a buffer of its own; whole -> acknowledged (Pushed), the vector clock of r moves on
    sum              ranks join in rank order: rank 0's buffer becomes the sum, rank 1's is added when it is whole ...
                     a push ahead of its turn stays staged; so the sum is the same to the bit in every order of arrival
    mean             the sum divided by the number of workers; asked-for norms are answered from it
    apply            server: when the step order of clock v is in too, scale, step the optimizer, version v+1
                     worker: at once; the mean itself is version v+1
    pulls            a pull at clock c is answered by version c-s or newer (s: staleness), else remembered

A push older than its rank's clock is acknowledged again and dropped: it is in already. One that skips a clock, or is
more than s+1 clocks ahead of the version, breaks the protocol.

No torn reads, no needless copies: answers are sent straight out of the values' buffer. Each push says which version its
worker holds whole. If at a step some worker may still be reading the old values, they are copied to a new buffer, which
the step then changes, and the old one is left to its readers. Workers that wait before they compute never cause it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.store.fit import PieceOptimizer
from psctl.store.messages import PART, FromServer, NormsOf, Push, Pushed, PushPart, Values, ValuesPart
from psctl.store.pieces import Piece, bytes_view, torch_dtype
from psctl.store.snapshot import Copied, Loading, copy_shard
from psctl.words import Layout, Number, Shard


class Terms(msgspec.Struct, frozen=True):
    """What a server must know of the job before the first push."""

    layout: Layout
    world: int  # number of workers
    update: str  # "server" | "worker"
    base: int = 0  # version of the start values: clocks already in them
    staleness: int = 0


class Order(msgspec.Struct, frozen=True):
    """How to apply one clock; all ranks agreed on it."""

    groups: list[dict[str, Number]]
    scale: float | None
    save: bool


class Send(msgspec.Struct, frozen=True):
    """An instruction: send this to that worker. The payload is not to be copied; see the module's theory."""

    rank: int
    message: FromServer
    payload: memoryview | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """An instruction: these bytes are this shard's part of the checkpoint of `step`."""

    step: int
    shard: int
    copied: list[Copied]


Output = Send | Snapshot


class Refusal(Exception):
    """The job cannot go on; told to every worker."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class Staged:
    """One rank's push while it comes in and until the sum takes it."""

    def __init__(self, message: Push, expected: int, buffer: torch.Tensor) -> None:
        self.weight, self.present, self.expected, self.filled = message.weight, message.present, expected, 0
        self.buffer = buffer
        self.bytes = bytes_view(buffer)

    @property
    def whole(self) -> bool:
        return self.filled == self.expected


class ShardMind:
    """One shard; see the module's theory. Its calls must not overlap; two shards know nothing of each other."""

    def __init__(self, terms: Terms, shard: Shard, held: Sequence[Piece], *, restored: bool = False) -> None:
        self._restored = restored
        self.shard, self.held = shard, held
        self.version: int | None = None  # None: start values are not all here
        self._terms = terms
        self._values = torch.zeros(len(shard.range), dtype=torch_dtype(shard.dtype))
        self._nbytes = self._values.numel() * self._values.element_size()
        self._optimizer = PieceOptimizer(terms.layout, held, self._values) if terms.update == "server" else None
        self._present = bytes(len(held))  # who had a gradient at the clock that made this version
        self._begun = 0  # bytes of start values
        self._taken = [terms.base - 1] * terms.world  # the vector clock: last clock that is whole, by rank
        self._landed = [terms.base - 1] * terms.world  # newest version that a rank said it holds
        self._sent = [terms.base - 1] * terms.world  # newest version that went out to a rank
        self._staged: dict[tuple[int, int], Staged] = {}  # (clock, rank)
        self._free: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None  # of the clock under way, over ranks below _next
        self._next = 0
        self._joint = bytes(len(held))
        self._mean: torch.Tensor | None = None
        self._squares: list[float | None] | None = None
        self._orders: dict[int, Order] = {}
        self._save_at: int | None = None  # version to copy for a checkpoint
        self._saved = terms.base - 1  # newest that was copied
        self._pulls: dict[int, int] = {}  # rank -> clock
        self._norms: dict[int, int] = {}

    # ---- start values ------------------------------------------------------------------------------------------

    def place_begin(self, rank: int, offset: int, size: int) -> memoryview | None:
        """Return where start values go."""
        if rank != 0 or self._restored or self.version is not None:
            raise ProtocolError(f"worker/{rank} sent start values of shard {self.shard.index}, which has its own")
        if offset != self._begun or offset + size > self._nbytes:
            raise self._wrong(rank, f"start values [{offset}, {offset + size})")
        return bytes_view(self._values)[offset : offset + size]

    def begun(self, rank: int, offset: int, size: int) -> list[Output]:
        """Count start values in; the last ones make the first version."""
        self.place_begin(rank, offset, size)
        self._begun += size
        return self._started() if self._begun == self._nbytes else []

    def loaded(self, loading: Loading) -> list[Output]:
        """Take over what was loaded: it is the first version."""
        assert self._optimizer is not None, "servers load only what they step"
        loading.finish(self.held, self._values, self._optimizer)
        return self._started()

    def _started(self) -> list[Output]:
        self.version = self._terms.base
        return self._answer_pulls()

    # ---- pushes ------------------------------------------------------------------------------------------------

    def place(self, rank: int, message: Push | PushPart, size: int) -> memoryview | None:
        """Return where a push's bytes go; None when it is in already and they are not wanted.

        Raises:
            ProtocolError: wrong size, wrong offset, wrong clock; the worker's fault, and nothing was changed.
        """
        if message.clock <= self._taken[rank]:
            return None
        if isinstance(message, Push):
            self._check(rank, message)
            staged, offset = self._open(rank, message), 0
        else:
            found = self._staged.get((message.clock, rank))
            if found is None or message.offset != found.filled:
                raise self._wrong(rank, f"part of clock {message.clock} at byte {message.offset}, out of order")
            staged, offset = found, message.offset
        if offset + size > staged.expected:
            self._drop(message.clock, rank)
            raise self._wrong(rank, f"push of {offset + size} bytes where {staged.expected} belong")
        return staged.bytes[offset : offset + size]

    def pushed(self, rank: int, message: Push | PushPart, size: int) -> list[Output]:
        """Count a push's bytes in; the last ones are acknowledged and the sum goes as far as it can."""
        if message.clock <= self._taken[rank]:
            again = isinstance(message, Push)
            return [Send(rank, Pushed(self.shard.index, message.clock))] if again else []
        if size == 0 and isinstance(message, Push):
            self.place(rank, message, 0)
        staged = self._staged.get((message.clock, rank))
        if staged is None:
            raise self._wrong(rank, f"bytes of clock {message.clock} without a place")
        staged.filled += size
        if not staged.whole:
            return []
        self._taken[rank] = message.clock
        return [Send(rank, Pushed(self.shard.index, message.clock)), *self._advance()]

    def _check(self, rank: int, message: Push) -> None:
        if self.version is None:
            raise self._wrong(rank, "push before there are start values")
        if message.clock != self._taken[rank] + 1 or message.clock > self.version + self._terms.staleness + 1:
            expected = f"{self._taken[rank] + 1} at version {self.version}"
            raise self._wrong(rank, f"push of clock {message.clock} where clock {expected} belongs")
        if len(message.present) != len(self.held) or message.present.strip(b"\x00\x01"):
            raise self._wrong(rank, f"push for {len(message.present)} pieces where {len(self.held)} are")
        if not (math.isfinite(message.weight) and message.weight >= 0):
            raise self._wrong(rank, f"push with weight {message.weight}")
        if message.landed > self._sent[rank]:
            raise self._wrong(rank, f"push that claims version {message.landed}, which was never sent")

    def _open(self, rank: int, message: Push) -> Staged:
        """Begin a push, or begin it anew: what came of it before a broken connection is overwritten."""
        self._drop(message.clock, rank)
        self._landed[rank] = max(self._landed[rank], message.landed)
        expected = self._nbytes if any(message.present) else 0
        staged = self._staged[message.clock, rank] = Staged(message, expected, self._buffer())
        return staged

    def _drop(self, clock: int, rank: int) -> None:
        staged = self._staged.pop((clock, rank), None)
        if staged is not None:
            self._free.append(staged.buffer)

    def _buffer(self) -> torch.Tensor:
        return self._free.pop() if self._free else torch.empty_like(self._values)

    # ---- sum, mean, step ---------------------------------------------------------------------------------------

    def ordered(self, clock: int, order: Order) -> list[Output]:
        """Take in how to apply `clock`."""
        self._orders[clock] = order
        return self._advance()

    def _advance(self) -> list[Output]:
        """Do all that can be done now."""
        outputs: list[Output] = []
        while self._sum_more():
            outputs += self._answer_norms()
            step = self._apply()
            if step is None:
                break
            outputs += step
        return outputs

    def _sum_more(self) -> bool:
        """Add the pushes whose turn it is; return whether the mean of the clock under way is known."""
        if self.version is None:
            return False
        while self._next < self._terms.world:
            staged = self._staged.get((self.version, self._next))
            if staged is None or not staged.whole:
                return False
            del self._staged[self.version, self._next]
            self._add(staged)
            self._next += 1
        if self._mean is None:
            assert self._sum is not None, "there is at least one worker"
            self._mean = self._sum.div_(self._terms.world)
        return True

    def _add(self, staged: Staged) -> None:
        """Add one rank's gradients; where it had none it counts as zero, whatever its bytes are."""
        if staged.weight != 1.0:
            staged.buffer.mul_(staged.weight)
        everything = all(staged.present)
        if self._sum is None:
            self._sum = staged.buffer
            for piece, there in zip(self.held, staged.present, strict=True):
                if not there:
                    self._sum.narrow(0, piece.at.start, len(piece.at)).zero_()
            self._joint = staged.present
            return
        if everything:
            self._sum.add_(staged.buffer)
        else:
            for piece, there in zip(self.held, staged.present, strict=True):
                if there:
                    where = (0, piece.at.start, len(piece.at))
                    self._sum.narrow(*where).add_(staged.buffer.narrow(*where))
        self._joint = bytes(a | b for a, b in zip(self._joint, staged.present, strict=True))
        self._free.append(staged.buffer)

    def _apply(self) -> list[Output] | None:
        """Make the next version if all that it needs is here; None when the order is not."""
        assert self.version is not None and self._mean is not None
        mean, order = self._mean, None
        if self._optimizer is None:
            if not self._being_read():
                self._free.append(self._values)
            self._values = mean
        else:
            order = self._orders.pop(self.version, None)
            if order is None:
                return None
            self._step(self._optimizer, mean, order)
            self._free.append(mean)
        self.version += 1
        self._present = self._joint
        self._sum = self._mean = self._squares = None
        self._next = 0
        outputs = self._answer_pulls()
        if order is not None and order.save:
            self._save_at = self.version
        return outputs + self._snapshot()

    def save(self, rank: int, version: int) -> list[Output]:
        """Copy version `version`, now or when it is reached; once, however many ask."""
        if version <= self._saved:
            return []
        if self._optimizer is None or (self.version is not None and version < self.version):
            raise self._wrong(rank, f"asked to save version {version} of a shard at {self.version}")
        self._save_at = version
        return self._snapshot()

    def _snapshot(self) -> list[Output]:
        if self._save_at is None or self._save_at != self.version or self._optimizer is None:
            return []
        self._saved, self._save_at = self.version, None
        copied = copy_shard(self._terms.layout, self.held, self._values, self._optimizer)
        return [Snapshot(self.version, self.shard.index, copied)]

    def _step(self, optimizer: PieceOptimizer, gradient: torch.Tensor, order: Order) -> None:
        if self._being_read():
            self._values = self._values.clone()
            optimizer.point_to(self._values)
        if order.scale is not None:
            gradient.mul_(order.scale)
        try:
            optimizer.step(gradient, [bool(there) for there in self._joint], order.groups)
        except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
            name = self._terms.layout.optimizer
            reason = f"{name} failed at clock {self.version}: {type(error).__name__}: {error}"
            raise Refusal(reason, "change its settings, or run it on the workers: sync.update: worker") from error

    def _being_read(self) -> bool:
        """Tell whether bytes of the values may still be on their way to a worker."""
        return any(sent > landed for sent, landed in zip(self._sent, self._landed, strict=True))

    # ---- answers -----------------------------------------------------------------------------------------------

    def pull(self, rank: int, clock: int) -> list[Output]:
        """Answer with the values, or remember that this rank waits."""
        self._pulls[rank] = clock
        return self._answer_pulls()

    def norms(self, rank: int, clock: int) -> list[Output]:
        """Answer with the squares of `clock`, or remember that this rank waits."""
        if self.version is not None and clock != self.version:
            raise self._wrong(rank, f"asked for norms of clock {clock} at version {self.version}")
        self._norms[rank] = clock
        return self._answer_norms()

    def missing(self, clock: int) -> list[int]:
        """Return the ranks without whose pushes no pull at `clock` can be answered."""
        needed = clock - self._terms.staleness
        if self.version is None or self.version >= needed:
            return []
        return [rank for rank, taken in enumerate(self._taken) if taken < needed - 1]

    def lost(self, rank: int) -> None:
        """Forget a rank's connection: what it waited for, and what it had pushed in part."""
        self._pulls.pop(rank, None)
        self._norms.pop(rank, None)
        for clock, owner in [key for key, staged in self._staged.items() if key[1] == rank and not staged.whole]:
            self._drop(clock, owner)

    def _answer_pulls(self) -> list[Output]:
        if self.version is None:
            return []
        ready = [rank for rank, clock in self._pulls.items() if self.version >= clock - self._terms.staleness]
        outputs: list[Output] = []
        for rank in sorted(ready):
            del self._pulls[rank]
            outputs += self._values_to(rank, self.version)
        return outputs

    def _values_to(self, rank: int, version: int) -> list[Output]:
        self._sent[rank] = version
        view, index = bytes_view(self._values), self.shard.index
        outputs: list[Output] = [Send(rank, Values(index, version, self._present), view[:PART] or None)]
        for offset in range(PART, self._nbytes, PART):
            outputs.append(Send(rank, ValuesPart(index, version, offset), view[offset : offset + PART]))
        return outputs

    def _answer_norms(self) -> list[Output]:
        if self._mean is None or self.version is None or not self._norms:
            return []
        if self._squares is None:
            self._squares = [
                _square(self._mean.narrow(0, piece.at.start, len(piece.at))) if there else None
                for piece, there in zip(self.held, self._joint, strict=True)
            ]
        answer = NormsOf(self.shard.index, self.version, self._squares)
        outputs: list[Output] = [Send(rank, answer) for rank in sorted(self._norms)]
        self._norms.clear()
        return outputs

    def _wrong(self, rank: int, what: str) -> ProtocolError:
        return ProtocolError(f"worker/{rank}, shard {self.shard.index}: {what}", where=f"worker/{rank}")


def _square(gradient: torch.Tensor) -> float:
    """Return the square of the 2-norm, summed in float64."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return float(real.to(torch.float64).square().sum())
