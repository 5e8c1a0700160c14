"""Why a strategy was chosen, in a sentence for users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psctl.job.events import PlanCandidate
from psctl.plan.simulation.schedule_timing import Timing
from psctl.units import format_seconds

DESCRIPTIONS: Mapping[str, str] = {
    "native": "the engine's own ring over all ranks",
    "ps": "servers add the gradients and send the result back",
    "root": "one rank adds for all",
    "cpu": "the host's processor adds for all",
    "sharded": "each rank adds a part for all, in proportion to its port",
    "one-shot": "each rank sends its whole vector to all others at once",
    "chain": "from rank to rank and back",
    "pipelined-chain": "along a chain, in chunks",
    "ring": "a ring in the order of the cables",
    "bidirectional-ring": "a ring that uses both directions of its cables",
    "multi-ring": "several rings that share no cable",
    "tree": "up a tree and down again",
    "pipelined-tree": "up a tree and down again, in chunks",
    "double-tree": "two trees that keep every port busy",
    "packed-trees": "trees that share no cable",
    "recursive-doubling": "pairs exchange whole sums, so few messages wait for each other",
    "halving-doubling": "pairs exchange halves, quarters and so on, so few messages wait for each other",
    "hierarchical": "ranks of a group add first, so that the slow links carry less",
}


def bottleneck(timing: Timing) -> str:
    """Return the limit of a prediction as text."""
    if timing.bottleneck == "latency":
        return "messages that wait for each other"
    if timing.bottleneck == "sums":
        return "additions"
    more = f" and {timing.alike} like it" if timing.alike > 0 else ""
    return f"{timing.bottleneck}{more}" if timing.bottleneck else "nothing"


def reason(chosen: str, rows: Sequence[PlanCandidate]) -> str:
    """Return why `chosen` is the best of the candidates.

    Args:
        chosen: the name.
        rows: every candidate.
    """
    feasible = sorted((row for row in rows if row.feasible), key=lambda row: row.seconds or 0.0)
    by_name = {row.strategy: row for row in rows}
    own, native, ps = by_name[chosen], by_name["native"], by_name["ps"]
    begin = DESCRIPTIONS[chosen]
    if len(feasible) == 1:
        out = native if chosen == "ps" else ps
        return f"{begin}; {out.strategy} is excluded: {out.why_not}"
    took, by_native = format_seconds(own.seconds or 0.0), format_seconds(native.seconds or 0.0)
    if chosen == "native":
        rival = next(row for row in feasible if row.strategy != "native")
        text = f"{begin} takes {took}"
        if rival.seconds is not None and own.seconds is not None and rival.seconds < own.seconds:
            text += f"; no other is faster by 5% or more (the best, {rival.strategy}, by less)"
        else:
            text += f", the next best, {rival.strategy}, {format_seconds(rival.seconds or 0.0)}"
    elif not native.feasible:
        text = f"{begin}: {took}; the engine's own is excluded: {native.why_not}"
    elif (native.seconds or 0.0) <= (own.seconds or 0.0):
        text = f"{begin}: {took}; the engine's own ring takes {by_native}, "
        text += "but its traffic is neither encrypted nor authenticated"
    else:
        text = f"{begin}: {took}, by the engine's own ring {by_native}, which waits for {native.bottleneck}"
    return text if ps.feasible else f"{text} (ps is excluded: {ps.why_not})"


def by_engine(strategy: str, *, gpus: bool) -> bool:
    """Whether the engine carries a strategy's bytes; else psctl does, in shared memory and encrypted connections."""
    return strategy == "native" or (gpus and strategy not in ("ps", "cpu"))


def engine(*, gpus: bool) -> str:
    """Return the engine's name for users."""
    return "NCCL" if gpus else "Gloo"


def channel(chosen: str, hosts: Sequence[str], *, gpus: bool, sealed: bool = True) -> str:
    """Return the transport of a strategy's bytes, as the end of a sentence; "" between GPUs of one host.

    Args:
        chosen: the name.
        hosts: of each rank, and of each server.
        gpus: gradients are on GPUs.
        sealed: psctl's own connections are encrypted.
    """
    if by_engine(chosen, gpus=gpus):
        if gpus and len(set(hosts)) == 1:
            return ""
        return f"; over {engine(gpus=gpus)}, which psctl neither encrypts nor authenticates"
    if len(set(hosts)) == 1:
        return "; bytes stay in memory that the host's processes share"
    own = "sealed connections" if sealed else "connections, which are not encrypted (network.encryption: off)"
    near = ", within a host in shared memory" if len(set(hosts)) < len(hosts) else ""
    return f"; over psctl's own {own}{near}"
