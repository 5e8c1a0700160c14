"""Frozen values that all packages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeAlias

import msgspec

MOST_RANKS = 1_000_000
"""Bound of all ranks, incarnations and counts of processes that a message may name."""

MOST_DIMENSIONS = 64
"""Dimensions that a tensor may have; torch has the same bound."""

MOST_LISTED = 1 << 20
"""Tensors, shards or members that one list of a message may have."""

Document = Mapping[str, Any]
"""A decoded JSON document, or an object in it. Any: its reader knows the types of its keys."""

JsonObject: TypeAlias = dict[str, object]
"""A JSON object that is printed, sent or stored as it is."""

StateValue: TypeAlias = Any
"""A value in the state of a worker. Any: it belongs to the user's script or a library (a scheduler, an optimizer), and
psctl only stores it and gives it back."""

State: TypeAlias = dict[str, StateValue]
"""The state of a worker in a checkpoint, without its tensors: JSON values by name."""

FIRST_BUCKET, BUCKET = 1 << 20, 25_000_000
"""Bytes of the first bucket of gradients, which is small so that it is sent early, and of the others by default: large
enough that a ring's latency does not count."""

PARTS_BUCKET = 4_000_000
"""Bytes of a bucket, by default, where the optimizer is sharded: when backward ends one is left to be summed, and then
the first layers wait for one."""


def bucket_bytes(given: int | None, *, sharded: bool = False) -> int:
    """Return the bytes of a bucket of gradients.

    Args:
        given: by the job file; None: nothing is; 0: measured in the first steps, which begin with the default.
        sharded: the optimizer is.
    """
    return given or (PARTS_BUCKET if sharded else BUCKET)


RACK = "rack"
"""The label of a host that names its rack."""

UNDECODABLE = (ValueError, RecursionError, OverflowError)
"""Raised by msgspec and json for bytes that are not what the decoder expects; other errors of a decoder are defects."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_LISTED)]
Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Fields with these types are checked when a message or file is decoded, before memory is taken for them."""


class PeerBytes(NamedTuple):
    """Bytes that a process sent to a peer, and received from it."""

    sent: int
    received: int


NO_PEERS: Mapping[str, PeerBytes] = {}
"""What a process that has no peers moves."""


def sum_of_bytes(*counts: Mapping[str, PeerBytes]) -> dict[str, PeerBytes]:
    """Return the bytes by peer of all these counts together."""
    found: dict[str, PeerBytes] = {}
    for each in counts:
        for peer, (sent, received) in each.items():
            before = found.get(peer, (0, 0))
            found[peer] = PeerBytes(before[0] + sent, before[1] + received)
    return found


HostName = NewType("HostName", str)
"""The `name:` of a host in the cluster file, unique in the file."""

Role = Literal["coordinator", "agent", "server", "worker", "reader"]

STRATEGIES = (
    "native", "root", "cpu", "sharded", "one-shot", "chain", "pipelined-chain", "ring", "bidirectional-ring",
    "multi-ring", "tree", "pipelined-tree", "double-tree", "packed-trees", "recursive-doubling", "halving-doubling",
    "hierarchical", "ps",
)  # fmt: skip
"""Every name of a strategy, as promised to users."""

DIVISIBLE = ("native", "sharded", "ring", "bidirectional-ring", "multi-ring", "halving-doubling", "hierarchical")
"""Strategies that divide the sum among the ranks, between its two halves: an optimizer can be sharded over these. (In a
tree, a chain or a root one rank would hold all of it, elsewhere every rank does.)"""


def consistency(staleness: int | None) -> str:
    """Return a staleness as job files have it: None is asp, 0 is bsp."""
    return "asp" if staleness is None else f"{{ssp: {staleness}}}" if staleness else "bsp"


class Range(msgspec.Struct, frozen=True, order=True):
    """A half-open range [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def meet(self, other: Range) -> Range:
        """Return the intersection of both ranges, empty when they are apart."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


class Member(msgspec.Struct, frozen=True, order=True):
    """One process of a job: its role, its rank within the role, and its incarnation.

    The rank of an agent is its host's place in the roster. Incarnations count from 0; a message of an older one is
    refused.
    """

    role: Role
    rank: Count
    incarnation: Count = 0

    def __str__(self) -> str:
        return f"{self.role}/{self.rank}"


class Address(msgspec.Struct, frozen=True, order=True):
    """The address of a listener: a numeric IP address and its port."""

    host: Annotated[str, msgspec.Meta(max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ParameterInfo(msgspec.Struct, frozen=True):
    """One parameter of the model, as every rank must have it.

    `group` is the index of the optimizer's group that holds it, -1 when none does. A frozen parameter
    (`trainable` false) has no gradient and no place in the flat spaces. `linear`: it is the weight of a linear layer
    that alone uses it.
    """

    name: Name
    shape: Shape
    dtype: Name  # torch's name without "torch.": float32, bfloat16 ...
    group: int
    trainable: bool = True
    linear: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for side in self.shape:
            count *= side
        return count


Number = float | int | bool | str | None | list[float]
"""A value of an optimizer's group besides its parameters: lr, betas, momentum, flags."""


class Layout(msgspec.Struct, frozen=True):
    """The synchronised state: parameters in the model's order, and the optimizer that updates them.

    `groups` holds, for each optimizer group, its numbers and flags verbatim (lr, betas, foreach ...).
    `optimizer` is the class's name in torch.optim when that class is fit for servers, else "". `scalars` is the dtype
    in which torch keeps an optimizer's one-a-parameter numbers (`step`, `mu_product`): float64 where that is the
    script's default dtype, else float32.
    """

    parameters: Annotated[tuple[ParameterInfo, ...], msgspec.Meta(max_length=MOST_LISTED)]
    optimizer: Name
    groups: Annotated[tuple[dict[str, Number], ...], msgspec.Meta(max_length=MOST_LISTED)]
    scalars: Name = "float32"


class Shard(msgspec.Struct, frozen=True):
    """A half-open range of the flat space of one dtype; `index` counts over all spaces, in the model's order."""

    index: int
    dtype: str
    range: Range


class ServerAt(msgspec.Struct, frozen=True):
    """A live server, its incarnation and its address; its rack where gradients are summed by rack, else ""."""

    rank: Count
    incarnation: Count
    address: Address
    rack: str = ""


class Assignment(msgspec.Struct, frozen=True):
    """The assignment of shards to servers; of two, the one with the larger epoch is valid.

    `chains[j]` holds the ranks of shard j's full members, primary first; `copies[j]` those that its primary still
    fills, which no acknowledgement waits for.
    """

    epoch: int
    chains: list[list[int]]
    copies: list[list[int]]
    servers: list[ServerAt]

    @property
    def owners(self) -> list[int]:
        """The rank of each shard's primary."""
        return [chain[0] for chain in self.chains]


NO_SERVERS = Assignment(0, [], [], [])
"""The assignment under strategies without servers."""


class TensorSlice(msgspec.Struct, frozen=True):
    """Elements [start, stop) of a tensor laid flat, by its name in a checkpoint.

    Names: `param/NAME`, `optim/NAME/KEY`, `buffer/NAME`, `track/KEY/NAME`. `shape` is the whole tensor's.
    """

    name: Name
    dtype: Name
    shape: Shape
    start: Size
    stop: Size


Slices = Annotated[list[TensorSlice], msgspec.Meta(max_length=MOST_LISTED)]


class Compression(msgspec.Struct, frozen=True):
    """The compression of gradients: which elements are sent, and how their values are coded.

    `share` is the share of the elements that topk sends; `skip` the probability with which random_skip leaves an
    element out (0: never); `significance` the threshold in parts of the root mean square (0: all are sent).
    """

    kind: str = "none"  # none | bf16 | fp16 | int8 | onebit | topk
    share: float = 1.0
    skip: float = 0.0
    significance: float = 0.0

    @property
    def off(self) -> bool:
        """Whether gradients are sent as they are."""
        return self == PLAIN

    @property
    def feedback(self) -> bool:
        """Whether elements left out of a push are kept on their worker and added to the next one (error feedback)."""
        return self.kind in ("int8", "onebit", "topk") or self.significance > 0

    @property
    def halves(self) -> str:
        """The type in which sums are sent too: "bfloat16" or "float16"; "": sums are sent as they are."""
        plain = not self.skip and not self.significance
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.kind, "") if plain else ""

    def __str__(self) -> str:
        filters = [f"random_skip: {self.skip:g}"] if self.skip else []
        filters += [f"significance: {self.significance:g}"] if self.significance else []
        kind = f"{{topk: {self.share:g}}}" if self.kind == "topk" else self.kind
        return f"{kind}, filters: [{', '.join(f'{{{each}}}' for each in filters)}]" if filters else kind


PLAIN = Compression()
"""No compression."""
