"""Costs of messages, and predicted times with their parts and the load of each link."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from psctl.schedule.schedule import Schedule

Method = Literal["simulated", "symmetry", "closed form"]


class Costs(msgspec.Struct, frozen=True):
    """The costs of a message besides its bytes on the links, in seconds; `bench` measures them.

    `alpha` adds to the route's latency and occupies no processor; `overhead` occupies the sender's processor, then the
    receiver's; `gamma` the receiver's, per byte that it reduces; `switch` is added whenever a sender changes its peer.
    """

    alpha: float = 0.0
    overhead: float = 0.0
    gamma: float = 0.0
    switch: float = 0.0


class LinkLoad(msgspec.Struct, frozen=True):
    """The bytes on a directed link, and the share of the time that they take at full rate."""

    link: str
    bytes: float
    utilisation: float


class CriticalTransfer(msgspec.Struct, frozen=True):
    """A transfer of the critical path: when it could start, when its bytes flowed, when its receiver had the sum."""

    step: int
    source: int
    destination: int
    chunk: int
    ready: float
    flowing: float
    delivered: float
    done: float


class Timing(msgspec.Struct, frozen=True):
    """A predicted time.

    `bottleneck` is the busiest link, or `latency`, or `sums`, whichever the critical path spent most time on; `alike`
    further links are as busy. `waiting`, `flowing` and `summing` divide the critical path's seconds. `loads` are all
    links that were used, busiest first; `critical` the legs in order of time. Closed forms have neither.
    """

    seconds: float
    method: Method
    bottleneck: str = ""
    alike: int = 0
    waiting: float = 0.0
    flowing: float = 0.0
    summing: float = 0.0
    loads: tuple[LinkLoad, ...] = ()
    critical: tuple[CriticalTransfer, ...] = ()


class StrategyPace(msgspec.Struct, frozen=True):
    """Factors by which a strategy's bytes flow, and its messages wait, longer than predicted, as `bench` measured:
    effects that links and an engine's costs do not model, such as senders that share one receiver, or ranks that share
    cores."""

    flowing: float = 1.0
    waiting: float = 1.0


AS_PREDICTED = StrategyPace()


def at_pace(timing: Timing, pace: StrategyPace) -> Timing:
    """Return a timing at a strategy's pace."""
    if pace == AS_PREDICTED:
        return timing
    flowing, waiting = timing.flowing * pace.flowing, timing.waiting * pace.waiting
    seconds = timing.seconds + (flowing - timing.flowing) + (waiting - timing.waiting)
    return msgspec.structs.replace(timing, seconds=seconds, flowing=flowing, waiting=waiting)


def in_pieces(timing: Timing, schedule: Schedule, pieces: int, costs: Costs) -> Timing:
    """Return the timing of overlapping pieces: while one message waits, the bytes of others flow, so only one piece's
    waiting counts; or the time of the busiest link or processor, where that is longer.

    Two workers a host on 4 hosts of 500 Mbit/s, 100 MB in 64 pieces: 2.52 s, where waiting one after the other would
    make it 2.87; measured 2.55.
    """
    moved = timing.flowing + timing.summing
    if pieces == 1 or moved < timing.waiting:  # too few bytes to overlap with waiting
        return timing
    sent = Counter(message.source for message in schedule.messages())
    busy = 2 * costs.overhead * max(sent.values(), default=0)
    wire = timing.seconds * max((load.utilisation for load in timing.loads), default=0.0)
    seconds = min(timing.seconds, max(moved + timing.waiting / pieces, wire, busy))
    return msgspec.structs.replace(timing, seconds=seconds, waiting=max(0.0, seconds - moved))
