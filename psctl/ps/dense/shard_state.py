"""The state of a shard at one version: values, optimizer state, presence and vector clock; a replicated state machine.

The same entry takes the same version to the same next one, bitwise, on the primary and on every replica. An entry is
the mean gradient of a clock (under asp: one worker's gradient) with the numbers that it is applied with.

No read sees a partial step, and copies are avoided: answers to pulls are sent directly from the values' buffer, or are
read there. If some worker may still be reading the old values at a step, they are copied to another buffer, which the
step then changes, and the old buffer stays for its readers until they have a newer version. Workers that wait before
they compute never cause this copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.ps.compression.error_feedback import narrow, rounded
from psctl.ps.dense.buffer_allocator import BufferAllocator
from psctl.ps.dense.clock_ledger import JobRefusal, StepOrder
from psctl.ps.pieces import Piece, Stretch, bytes_view, stretch, torch_dtype
from psctl.ps.server_optimizers import SCALARS, PieceOptimizer
from psctl.ps.snapshot import CopiedSlice, KeptCopies, ShardLoading, copy_shard, dtype_name
from psctl.types import PLAIN, UNDECODABLE, Compression, Layout, Shard

STATES = 8
"""Upper bound for a copy: more tensors of a shard's size than any fit optimizer keeps, at most twice as wide."""


class Terms(msgspec.Struct, frozen=True):
    """The properties of a job that a server needs before the first push."""

    layout: Layout
    world: int  # number of workers at the start
    update: str  # "server" | "worker"
    base: int = 0  # version of the start values: clocks already in them
    staleness: int | None = 0  # clocks; 0: bsp; None: asp
    compression: Compression = PLAIN
    hosts: tuple[tuple[int, ...], ...] = ()  # ranks that share a host, two or more, ascending; by their first ranks
    by_rack: bool = False  # `hosts` has the ranks of each rack instead, and values are forwarded within them
    in_backward: float = 0.0  # part of the shards that step as soon as their own pushes are in (StepInBackward)

    @property
    def pushes_ask(self) -> bool:
        """Whether a push is answered with its sum without a Pull: where workers step all need it, each shard as soon as
        it is complete. A host sum is pushed by one worker for others, so there each worker pulls."""
        return self.update == "worker" and self.staleness == 0 and not self.hosts

    @property
    def buffers(self) -> int:
        """The number of clocks whose gradients a worker keeps: one under way, and those not yet on all replicas."""
        return 2 if self.staleness is None else self.staleness + 2


class ShardEntry(msgspec.Struct, frozen=True):
    """Head of an entry: `clock`, how it is applied, which pieces have a gradient, and which ranks' clocks advance."""

    clock: int
    order: StepOrder
    present: bytes
    ranks: tuple[int, ...]


class _Tensor(msgspec.Struct, frozen=True):
    """One tensor of a copy; `key` "": the values, and `piece` is -1; else the optimizer state of that name."""

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
    """The state of one shard; the module's docstring describes it.

    Args:
        read: returns whether a worker may still be reading a version.
        allocator: allocates buffers.
    """

    def __init__(
        self, terms: Terms, shard: Shard, held: Sequence[Piece], read: Callable[[int], bool], allocator: BufferAllocator
    ) -> None:
        self.terms, self.shard, self.held, self._allocator = terms, shard, held, allocator
        self.version: int | None = None  # None: start values have not all arrived
        self._made: dict[int, Stretch] = {}  # all buffers, by address
        self.values = self._new()
        self.narrow = narrow(terms.compression, terms.update, self.values.dtype)
        """The dtype in which sums are sent, and to which they are rounded; None: their own."""
        self.nbytes = self.values.numel() * self.values.element_size()
        self.present = bytes(len(held))  # which pieces had a gradient at the clock that made this version
        self.applied: dict[int, int] = {}  # the vector clock: last clock of each rank that is in the values
        self._optimizer = PieceOptimizer(terms.layout, held, self.values) if terms.update == "server" else None
        self._copies = KeptCopies()
        self._read = read
        self._free: list[torch.Tensor] = []
        self._narrowed: tuple[int | None, torch.Tensor] = (None, self.values)
        self._retired: list[tuple[int, torch.Tensor]] = []  # old versions that a worker may be reading

    # ---- buffers ------------------------------------------------------------------------------------------------

    def _new(self) -> torch.Tensor:
        buffer = self._allocator.zeros(len(self.shard.range), torch_dtype(self.shard.dtype))
        self._made[buffer.data_ptr()] = stretch(buffer)
        return buffer

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        """Return the memory of a tensor of this shard as bytes."""
        found = self._made.get(tensor.data_ptr())
        return bytes_view(tensor) if found is None or found.tensor is not tensor else found.bytes

    def _tensor(self, payload: memoryview) -> torch.Tensor:
        """Return the buffer whose bytes these are. A new tensor over them would hold the view, which holds the earlier
        tensor: a buffer in rotation would be wrapped once more each clock."""
        for made in self._made.values():  # a few
            if made.bytes is payload:
                return made.tensor
        found = torch.frombuffer(payload, dtype=self.values.dtype)
        whole = self._made.get(found.data_ptr())
        return found if whole is None else whole.tensor

    def take_buffer(self) -> torch.Tensor:
        """Return a buffer of the shard's size, with undefined content."""
        if not self._free and self._retired:
            self._free = [buffer for version, buffer in self._retired if not self._read(version)]
            self._retired = [(version, buffer) for version, buffer in self._retired if self._read(version)]
        return self._free.pop() if self._free else self._new()

    def give_buffer(self, buffer: torch.Tensor) -> None:
        """Return a buffer that has no readers to the free ones."""
        self._free.append(buffer)

    def values_to_send(self) -> torch.Tensor:
        """Return the values in the dtype in which they are sent: narrower ones are made once a version."""
        if self.narrow is None or self.version == self.terms.base:
            return self.values
        if self._narrowed[0] != self.version:
            self._narrowed = self.version, self.values.to(self.narrow)
        return self._narrowed[1]

    # ---- the state machine ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the values, or the loaded state, the first version."""
        self.version = self.terms.base

    def on_loaded(self, loading: ShardLoading) -> None:
        """Make the state loaded from a checkpoint the first version."""
        assert self._optimizer is not None, "servers load only what they step"
        loading.finish(self.held, self.values, self._optimizer)
        self.begin()

    def encode_head(self, entry: ShardEntry) -> bytes:
        """Encode an entry's head for the chain."""
        return _encode(entry)

    @property
    def entry_limit(self) -> int:
        """The bytes of the shard's gradients."""
        return self.nbytes

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return the buffer for an entry's payload.

        Raises:
            ProtocolError: it is no entry of this shard.
        """
        present = self._entry(head).present
        if size != (self.nbytes if any(present) else 0):
            raise ProtocolError(f"shard {self.shard.index}: an entry of {size} bytes where {self.nbytes} belong")
        return self.bytes_of(self.take_buffer()) if size else memoryview(bytearray())

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> None:
        """Apply an entry that was forwarded by the chain; as `apply_entry`, with the gradient's bytes.

        Raises:
            ProtocolError: it is no entry of this shard.
            JobRefusal: as `apply_entry`.
        """
        self.apply_entry(self._entry(head), self._tensor(payload) if len(payload) else None, kept=kept)

    def apply_entry(self, entry: ShardEntry, gradient: torch.Tensor | None, *, kept: bool) -> None:
        """Make the next version.

        Args:
            entry: the entry to apply.
            gradient: None when no piece has one.
            kept: the gradient must not change, because it is still being sent; else this shard may change it.

        Raises:
            JobRefusal: the optimizer failed; the user's fault.
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
        """Release a payload of `entry_buffer`, or one that was kept."""
        if len(payload):
            self.give_buffer(self._tensor(payload))

    def _retire(self, version: int) -> None:
        """Release the values of `version`, or keep them for their readers."""
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
        except UNDECODABLE as error:
            raise ProtocolError(f"shard {self.shard.index}: no entry: {error}") from error
        if len(entry.present) != len(self.held):
            raise ProtocolError(f"shard {self.shard.index}: an entry for {len(entry.present)} pieces")
        return entry

    # ---- copies ---------------------------------------------------------------------------------------------------

    def checkpoint(self) -> list[CopiedSlice]:
        """Copy parameters and optimizer state in the form of a checkpoint."""
        assert self._optimizer is not None, "workers save what they step"
        return copy_shard(self.terms.layout, self.held, self.values, self._optimizer, self._copies)

    def snapshot(self) -> tuple[bytes, memoryview]:
        """Copy the whole state; returns a head and the bytes."""
        tensors = [(_Tensor(-1, "", self.shard.dtype, self.values.numel()), self.values)]
        for index in range(len(self.held)) if self._optimizer is not None else ():
            assert self._optimizer is not None
            for key, tensor in self._optimizer.state(index).items():
                flat = tensor.detach().reshape(-1)
                tensors.append((_Tensor(index, key, dtype_name(flat), flat.numel()), flat))
        head = _Head(self.present, dict(self.applied), [info for info, _ in tensors])
        return _encode(head), bytes_view(torch.cat([tensor.view(torch.uint8) for _, tensor in tensors]))

    @property
    def copy_limit(self) -> int:
        """Upper bound of the bytes of a copy of the state."""
        return 2 * STATES * (self.nbytes + 8 * len(self.held)) + 64

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Replace the state by another server's `snapshot`.

        Raises:
            ProtocolError: it is no copy of this shard.
        """
        try:
            found = _HEAD.decode(head)
        except UNDECODABLE as error:
            raise ProtocolError(f"shard {self.shard.index}: no copy: {error}") from error
        sizes = [one.count * torch_dtype(one.dtype).itemsize for one in found.tensors]
        if not sizes or sum(sizes) != len(data) or found.tensors[0].count != self.values.numel():
            raise ProtocolError(f"shard {self.shard.index}: a copy of {len(data)} bytes that is another shard's")
        self._made.pop(self.values.data_ptr(), None)  # its readers hold references
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
