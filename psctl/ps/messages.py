"""What workers and servers say to each other; one small class a message.

Clocks count from 0: clock c is the c-th step of the job. *Version* v of a shard holds the clocks 0 .. v-1, so version 0
is the start values and a pull at clock c is answered by version c-s or newer (s: staleness, 0 under bsp).
A message that carries a payload says so. Bytes of one shard to one peer travel in order, in parts of at most PART
bytes, each part's `offset` being where the one before ended.

A push's life: sent to the shard's *primary*; whole there -> Taken; applied, and on every member of the shard's chain
of replicas -> Pushed (Values of a version that holds the clock say it too, under bsp and ssp). The worker keeps the
bytes until Pushed. Nothing is said about a shard to a server that has not said Leads on this connection; on every
Leads all that is outstanding is sent again (client.py).
"""

from __future__ import annotations

import msgspec

from psctl.types import Number

PART = 512 * 1024
"""Bytes of one part of what is kept aside, or copied from server to server."""

LARGE = 4 << 20
"""Bytes of one part of a push, of values, of a chain's entry: a message is taken in place, and wire/ cuts it."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all kinds; the class's name is its tag on the wire."""


class SharedRange(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + size) of shared memory that the sender holds, by its number; see lent_buffers.py."""

    segment: int
    offset: int
    size: int


# ---- a worker to a server ----------------------------------------------------------------------------------------


class StartValues(Message, frozen=True):
    """Payload: start values of the shard, from byte `offset`. Rank 0 alone sends them."""

    shard: int
    offset: int


class Push(Message, frozen=True):
    """First part of a worker's gradients of one shard at one clock. Payload: bytes from 0 on.

    `present` has one byte a piece, 1 where this worker had a gradient; no bytes follow when all are 0.
    `landed` is the newest version of the shard that this worker holds whole: older ones may be overwritten.
    `at`: no payload and no parts; all of the bytes lie there. `size`: bytes in all, where they are a code
    (error_feedback.py); -1: the gradients as they are.
    Where workers step (`Terms.pushes_ask`) it is answered as a Pull of the version that holds it would be.
    `covers`: the bytes are a host sum (host_sums.py), of these ranks' gradients, each times its weight; the sender is
    one of them. `weight` is the sum of theirs, `present` says what any of them has. (): the sender's alone.
    """

    shard: int
    clock: int
    weight: float
    present: bytes
    landed: int
    at: SharedRange | None = None
    size: int = -1
    covers: tuple[int, ...] = ()


class PushPart(Message, frozen=True):
    """Payload: further bytes of the Push before it, from byte `offset`."""

    shard: int
    clock: int
    offset: int


class Step(Message, frozen=True):
    """My pushes of `clock` to other servers are Taken, those to you come first: step with these numbers a group.

    What left in another worker's host sum comes on that one's connection: it must be Taken, whoever leads its shard.

    To every server, where servers step (`update: server`). So when all ranks' orders of a clock are at any one server,
    every shard holds every push of it: a death can then be cut consistently.
    The joint gradient is multiplied by `scale` first (clipping); None: left alone. `save`: the result is a checkpoint.
    """

    clock: int
    groups: list[dict[str, Number]]
    scale: float | None = None
    save: bool = False


class SaveNow(Message, frozen=True):
    """Version `version`, which no step has ordered to be saved, is a checkpoint too.

    Any rank may say so, all may; under asp all must, each before it pushes clock `version`.
    """

    version: int


class NormsQuery(Message, frozen=True):
    """Send NormsOf of `clock` for each of your shards, once all pushes are in."""

    clock: int


class Pull(Message, frozen=True):
    """Send these shards, in this order of wish: each at a version of `oldest` or newer, that is newer than `have` too.

    Under asp versions count pushes: there the values hold this worker's own pushes of all clocks before `clock`, and
    everyone's of all clocks before `oldest`.
    """

    clock: int
    shards: list[int]
    oldest: int
    have: list[int]


class WaitQuery(Message, frozen=True):
    """Asks which workers keep the sender waiting; the answer (WaitAnswer) also proves that the server is alive.

    Parameters: the sender waits for the version that `clock` reads. Tables: it waits until all of the group of `store`
    have finished `clock` clocks.
    """

    clock: int
    store: str = ""


class PutRankState(Message, frozen=True):
    """Payload: bytes of what travels beside the gradients (buffers, tracked state) at the start of `clock`.

    From byte `offset`, of `size` in all. To the primary of shard 0, which passes it down its chain. `rank`: whose;
    under bsp and ssp rank 0's counts, under asp each rank leaves its own.
    """

    clock: int
    size: int
    offset: int
    rank: int = 0


class RankStateQuery(Message, frozen=True):
    """Send that rank's Aside of `clock`, when it is there. To the primary of shard 0."""

    clock: int
    rank: int = 0


class SharedMemoryOffer(Message, frozen=True):
    """I hold shared memory of this number: if you can have it, we are on one host, and need not send bytes."""

    segment: int


# ---- a worker to another of its host (host_sums.py) --------------------------------------------------------------


class HostPush(Message, frozen=True):
    """Take my gradients of this shard with you: they lie there, and stay until I hear that they are Pushed."""

    shard: int
    clock: int
    weight: float
    present: bytes
    at: SharedRange


class PushAlone(Message, frozen=True):
    """A shard's gradients of a clock do not go together: each pushes his own."""

    shard: int
    clock: int


# ---- a server to a worker ----------------------------------------------------------------------------------------


class SharedMemoryAccepted(Message, frozen=True):
    """I have what your Near named: from now on say where bytes lie in it; I do the same with mine."""


class Leads(Message, frozen=True):
    """I am the primary of these shards, by the assignment `epoch` or a newer one: send what is outstanding for them."""

    epoch: int
    shards: list[int]


class PushStaged(Message, frozen=True):
    """The push of this clock is whole at the primary (or was, before). Its bytes must still be kept."""

    shard: int
    clock: int


class Pushed(Message, frozen=True):
    """The effect of the push of this clock is on every member of the chain: its bytes may be given up."""

    shard: int
    clock: int


class NormsAnswer(Message, frozen=True):
    """Squares of the 2-norm of the joint gradient of each piece, in piece order; None where nobody had a gradient."""

    shard: int
    clock: int
    squares: list[float | None]


class Values(Message, frozen=True):
    """First part of a shard at one version, all of it the same version; answers the Pull at `clock`. Payload: bytes.

    `present` tells for each piece whether any worker had a gradient at the clock that made this version. `clocks`:
    everyone's clocks before it are in the values: the version itself, but under asp.
    `at`: no payload and no parts; all of the bytes lie there.
    """

    shard: int
    version: int
    present: bytes
    clock: int
    clocks: int
    at: SharedRange | None = None


class ValuesPart(Message, frozen=True):
    """Payload: further bytes of the Values before it, from byte `offset`."""

    shard: int
    version: int
    offset: int


class RankStateAnswer(Message, frozen=True):
    """Answer to AsideOf. Payload: its bytes from `offset`, of `size` in all."""

    clock: int
    size: int
    offset: int


class WaitAnswer(Message, frozen=True):
    """Answer to WaitQuery: the ranks whose pushes, step orders or clocks are missing (none: they are being applied)."""

    clock: int
    workers: list[int]
    store: str = ""


class Refused(Message, frozen=True):
    """The job (tables: this store) cannot go on, for example because two ranks ordered different steps."""

    reason: str
    hint: str
    store: str = ""


# ---- a server to a server: the chain of one shard (chain.py) -----------------------------------------------------


class Forward(Message, frozen=True):
    """Entry `number` of the shard: what makes version number+1 of version `number`. Payload: its bytes from 0 on.

    `head` says what to do with them, in the words of the replicated machine; `size`: of the payload in all.
    """

    shard: int
    number: int
    epoch: int
    size: int
    head: bytes


class ForwardPart(Message, frozen=True):
    """Payload: further bytes of the Forward before it, from byte `offset`."""

    shard: int
    number: int
    offset: int


class Forwarded(Message, frozen=True):
    """All of the chain from me on have every entry below `version`; I have those below `has` (-1: nothing at all).

    `epoch`: the newest assignment that I know. `copy`: the last one that I took. `missed`: I ignored an entry, for I
    lack those before it, or a copy, for I was not to have one then.
    """

    shard: int
    version: int
    has: int
    epoch: int
    copy: str = ""
    missed: bool = False


class ReplicaQuery(Message, frozen=True):
    """By assignment `epoch` you follow me: say what you have (Forwarded)."""

    shard: int
    epoch: int


class StateCopy(Message, frozen=True):
    """The whole state of the shard at `version` follows: `size` bytes in CopyParts, CopyEnd, then newer entries.

    `copy` names it; what its receiver had counts for nothing any more.
    """

    shard: int
    version: int
    epoch: int
    size: int
    head: bytes
    copy: str


class LeadTransfer(Message, frozen=True):
    """What I had taken in and not applied at `version` follows, in CopyParts, then CopyEnd: you are the primary now."""

    shard: int
    version: int
    epoch: int
    size: int
    head: bytes


class StatePart(Message, frozen=True):
    """Payload: bytes of the CopyBegin or HandOver before it, from byte `offset`."""

    shard: int
    offset: int


class StateEnd(Message, frozen=True):
    """The CopyBegin or HandOver is whole."""

    shard: int


class LeadAccepted(Message, frozen=True):
    """I have your HandOver and lead the shard."""

    shard: int
    epoch: int


FromWorker = (
    StartValues | Push | PushPart | Step | SaveNow | NormsQuery | Pull | WaitQuery | PutRankState | RankStateQuery
)
FromServer = (
    Leads
    | PushStaged
    | Pushed
    | NormsAnswer
    | Values
    | ValuesPart
    | RankStateAnswer
    | WaitAnswer
    | Refused
    | SharedMemoryAccepted
)
BetweenServers = (
    Forward
    | ForwardPart
    | Forwarded
    | ReplicaQuery
    | StateCopy
    | LeadTransfer
    | StatePart
    | StateEnd
    | LeadAccepted
    | PutRankState
)
"""What servers say to each other."""

BetweenPeers = HostPush | PushAlone
"""What workers of one host say to each other."""
