"""What a shard is at one version: values, optimizer state, presence and the vector clock; a replicated state machine.

The same entry takes the same version to the same next one, to the bit, on the primary and on every replica. An entry is
the mean gradient of a clock (under asp: one worker's gradient) with the numbers that it is applied with.

No torn reads, no needless copies: answers to pulls are sent straight out of the values' buffer, or read there. If at a
step some worker may still be reading the old values, they are copied to another buffer, which the step then changes,
and the old one is left to its readers until they have a newer version. Workers that wait before they compute never
cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.ps.compression.error_feedback import narrow, rounded
from psctl.ps.dense.clock_ledger import JobRefusal, StepOrder
from psctl.ps.dense.lent_buffers import Lending
from psctl.ps.pieces import Piece, Stretch, bytes_view, stretch, torch_dtype
from psctl.ps.server_optimizers import SCALARS, PieceOptimizer
from psctl.ps.snapshot import CopiedSlice, ShardLoading, copy_shard, dtype_name
from psctl.types import PLAIN, Compression, Layout, Shard

STATES = 8
"""More tensors of a shard's size than any fit optimizer keeps, twice as wide at most: what a copy may take."""


class Terms(msgspec.Struct, frozen=True):
    """What a server must know of the job before the first push."""

    layout: Layout
    world: int  # number of workers at the start
    update: str  # "server" | "worker"
    base: int = 0  # version of the start values: clocks already in them
    staleness: int | None = 0  # clocks; 0: bsp; None: asp
    compression: Compression = PLAIN
    hosts: tuple[tuple[int, ...], ...] = ()  # ranks that share a host, two or more, ascending; by their first ranks

    @property
    def pushes_ask(self) -> bool:
        """Whether a push is answered with the sum that it is in, unasked: where workers step all want it, each shard as
        soon as it is whole. A push that goes in a host sum is another's, so there each worker pulls by itself."""
        return self.update == "worker" and self.staleness == 0 and not self.hosts

    @property
    def buffers(self) -> int:
        """How many clocks' gradients a worker may keep: one under way, and those that are not on all replicas yet."""
        return 2 if self.staleness is None else self.staleness + 2


class ShardEntry(msgspec.Struct, frozen=True):
    """Head of an entry: `clock`, how it is applied, which pieces have a gradient, and whose clock moves on."""

    clock: int
    order: StepOrder
    present: bytes
    ranks: tuple[int, ...]


class _Tensor(msgspec.Struct, frozen=True):
    """One tensor of a copy; `key` "": the values, and `piece` is -1; else the optimizer's state of that name."""

    piece: int
    key: str
    dtype: str
    count: int


class _Head(msgspec.Struct, frozen=True):
    """Head of a copy; its bytes are the tensors', one after the other."""

    present: bytes
    applied: dict[int, int]
    tensors: list[_Tensor]


_ENTRY = msgspec.msgpack.Decoder(ShardEntry)
_HEAD = msgspec.msgpack.Decoder(_Head)
_encode = msgspec.msgpack.Encoder().encode


class ShardState:
    """See the module's docstring.

    Args:
        read: tells whether a version may be on its way to someone.
        lending: where buffers come from.
    """

    def __init__(
        self, terms: Terms, shard: Shard, held: Sequence[Piece], read: Callable[[int], bool], lending: Lending
    ) -> None:
        self.terms, self.shard, self.held, self._lending = terms, shard, held, lending
        self.version: int | None = None  # None: start values are not all here
        self._made: dict[int, Stretch] = {}  # all buffers, by where they lie
        self.values = self._new()
        self.narrow = narrow(terms.compression, terms.update, self.values.dtype)
        """The type in which sums travel, and to which they are rounded; None: theirs."""
        self.nbytes = self.values.numel() * self.values.element_size()
        self.present = bytes(len(held))  # which pieces had a gradient at the clock that made this version
        self.applied: dict[int, int] = {}  # the vector clock: last clock of each rank that is in the values
        self._optimizer = PieceOptimizer(terms.layout, held, self.values) if terms.update == "server" else None
        self._read = read
        self._free: list[torch.Tensor] = []
        self._narrowed: tuple[int | None, torch.Tensor] = (None, self.values)
        self._retired: list[tuple[int, torch.Tensor]] = []  # old versions that someone may be reading

    # ---- buffers ------------------------------------------------------------------------------------------------

    def _new(self) -> torch.Tensor:
        buffer = self._lending.zeros(len(self.shard.range), torch_dtype(self.shard.dtype))
        self._made[buffer.data_ptr()] = stretch(buffer)
        return buffer

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        """Return the memory of a tensor of this shard as bytes."""
        found = self._made.get(tensor.data_ptr())
        return bytes_view(tensor) if found is None or found.tensor is not tensor else found.bytes

    def _tensor(self, payload: memoryview) -> torch.Tensor:
        """Return the buffer whose bytes these are. A new tensor over them would hold the view, which holds the tensor
        before: a buffer that goes round would be wrapped once more each clock."""
        for made in self._made.values():  # a few
            if made.bytes is payload:
                return made.tensor
        found = torch.frombuffer(payload, dtype=self.values.dtype)
        whole = self._made.get(found.data_ptr())
        return found if whole is None else whole.tensor

    def take_buffer(self) -> torch.Tensor:
        """Return a buffer of the shard's size, with anything in it."""
        if not self._free and self._retired:
            self._free = [buffer for version, buffer in self._retired if not self._read(version)]
            self._retired = [(version, buffer) for version, buffer in self._retired if self._read(version)]
        return self._free.pop() if self._free else self._new()

    def give_buffer(self, buffer: torch.Tensor) -> None:
        """Take a buffer back that nobody reads any more."""
        self._free.append(buffer)

    def values_to_send(self) -> torch.Tensor:
        """Return the values as they travel: narrower ones are made once a version, and live until they have left."""
        if self.narrow is None or self.version == self.terms.base:
            return self.values
        if self._narrowed[0] != self.version:
            self._narrowed = self.version, self.values.to(self.narrow)
        return self._narrowed[1]

    # ---- the state machine ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The values, or what was loaded, are the first version."""
        self.version = self.terms.base

    def on_loaded(self, loading: ShardLoading) -> None:
        """Take over what was loaded from a checkpoint: it is the first version."""
        assert self._optimizer is not None, "servers load only what they step"
        loading.finish(self.held, self.values, self._optimizer)
        self.begin()

    def encode_head(self, entry: ShardEntry) -> bytes:
        """Return an entry's head as it goes down the chain."""
        return _encode(entry)

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return where an entry's payload goes.

        Raises:
            ProtocolError: it is no entry of this shard.
        """
        present = self._entry(head).present
        if size != (self.nbytes if any(present) else 0):
            raise ProtocolError(f"shard {self.shard.index}: an entry of {size} bytes where {self.nbytes} belong")
        return self.bytes_of(self.take_buffer()) if size else memoryview(bytearray())

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> None:
        """Make the next version by an entry that came down the chain; as `enter`, with the gradient's bytes.

        Raises:
            ProtocolError: it is no entry of this shard.
            Refusal: as `enter`.
        """
        self.apply_entry(self._entry(head), self._tensor(payload) if len(payload) else None, kept=kept)

    def apply_entry(self, entry: ShardEntry, gradient: torch.Tensor | None, *, kept: bool) -> None:
        """Make the next version.

        Args:
            entry: how.
            gradient: None when no piece has one.
            kept: the gradient must stay as it is, for it is still on its way to others; else it is this shard's to use.

        Raises:
            Refusal: the optimizer failed; the user's fault.
        """
        assert self.version is not None, "there are values to step from"
        if gradient is None:
            gradient = self.take_buffer().zero_()
        elif kept:
            gradient = self.take_buffer().copy_(gradient)
        if self._optimizer is None:
            self._retire(self.version)
            self.values = gradient if self.narrow is None else rounded(gradient, self.narrow)
        else:
            self._step(self._optimizer, gradient, entry)
            self.give_buffer(gradient)
        self.version += 1
        self.present = entry.present
        for rank in entry.ranks:
            self.applied[rank] = entry.clock

    def release(self, payload: memoryview) -> None:
        """Take back a payload of `room`, or one that was kept, which nobody needs any more."""
        if len(payload):
            self.give_buffer(self._tensor(payload))

    def _retire(self, version: int) -> None:
        """Give up the values of `version`, to its readers where there are some."""
        if self._read(version):
            self._retired.append((version, self.values))
        else:
            self.give_buffer(self.values)

    def _step(self, optimizer: PieceOptimizer, gradient: torch.Tensor, entry: ShardEntry) -> None:
        assert self.version is not None, "there are values to step from"
        if self._read(self.version):
            values = self.take_buffer().copy_(self.values)
            self._retire(self.version)
            self.values = values
            optimizer.set_values(self.values)
        if entry.order.scale is not None:
            gradient.mul_(entry.order.scale)
        try:
            optimizer.step(gradient, [bool(there) for there in entry.present], entry.order.groups)
        except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
            name = self.terms.layout.optimizer
            reason = f"{name} failed at clock {entry.clock}: {type(error).__name__}: {error}"
            raise JobRefusal(reason, "change its settings, or run it on the workers: sync.update: worker") from error

    def _entry(self, head: bytes) -> ShardEntry:
        try:
            entry = _ENTRY.decode(head)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"shard {self.shard.index}: no entry: {error}") from error
        if len(entry.present) != len(self.held):
            raise ProtocolError(f"shard {self.shard.index}: an entry for {len(entry.present)} pieces")
        return entry

    # ---- copies ---------------------------------------------------------------------------------------------------

    def checkpoint(self) -> list[CopiedSlice]:
        """Copy parameters and optimizer state as a checkpoint has them."""
        assert self._optimizer is not None, "workers save what they step"
        return copy_shard(self.terms.layout, self.held, self.values, self._optimizer)

    def snapshot(self) -> tuple[bytes, list[memoryview]]:
        """Copy all of the state; returns a head and the bytes."""
        tensors = [(_Tensor(-1, "", self.shard.dtype, self.values.numel()), self.values.clone())]
        for index in range(len(self.held)) if self._optimizer is not None else ():
            assert self._optimizer is not None
            for key, tensor in self._optimizer.state(index).items():
                flat = tensor.detach().clone().reshape(-1)
                tensors.append((_Tensor(index, key, dtype_name(flat), flat.numel()), flat))
        head = _Head(self.present, dict(self.applied), [info for info, _ in tensors])
        return _encode(head), [bytes_view(tensor) for _, tensor in tensors if tensor.numel()]

    @property
    def copy_limit(self) -> int:
        """Bytes that a copy of the state may take at most."""
        return 2 * STATES * (self.nbytes + 8 * len(self.held)) + 64

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Become what another's `snapshot` was.

        Raises:
            ProtocolError: it is no copy of this shard.
        """
        try:
            found = _HEAD.decode(head)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"shard {self.shard.index}: no copy: {error}") from error
        sizes = [one.count * torch_dtype(one.dtype).itemsize for one in found.tensors]
        if not sizes or sum(sizes) != len(data) or found.tensors[0].count != self.values.numel():
            raise ProtocolError(f"shard {self.shard.index}: a copy of {len(data)} bytes that is another shard's")
        self._made.pop(self.values.data_ptr(), None)  # who reads them holds them
        self.values = self._new()
        if self._optimizer is not None:
            self._optimizer = PieceOptimizer(self.terms.layout, self.held, self.values)
        states: dict[int, dict[str, torch.Tensor]] = {}
        offset = 0
        for info, size in zip(found.tensors, sizes, strict=True):
            tensor = torch.empty(info.count, dtype=torch_dtype(info.dtype))
            bytes_view(tensor)[:] = data[offset : offset + size]
            offset += size
            if info.piece < 0:
                self.values.copy_(tensor)
            else:
                states.setdefault(info.piece, {})[info.key] = tensor.reshape(()) if info.key in SCALARS else tensor
        if self._optimizer is not None:
            for index, state in states.items():
                self._optimizer.restore(index, state)
        self.version, self.present, self.applied = version, found.present, found.applied
        self._narrowed = (None, self.values)
