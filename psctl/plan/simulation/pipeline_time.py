"""The time of long pipelines, from two short ones.

Once a pipeline is full, every further chunk takes as long as the one before: with chunks of one size, the time is
linear in their number. So two simulations with few chunks tell the time with any number of them; 64 ranks and 500
chunks would be 120,000 messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from psctl.plan.simulation.flow_simulation import FREE, simulate
from psctl.plan.simulation.routes import SimulatedNetwork
from psctl.plan.simulation.schedule_timing import Costs, LinkLoad, Timing
from psctl.schedule.schedule import Schedule

FEW, ENOUGH = 12, 24
"""Chunks of the two simulations: chains and trees of 16 to 64 ranks came within 1% of the long simulation so; with
fewer a double tree is 3% off."""

MESSAGES = 4000
"""Schedules no larger than this are simulated as they are."""


def simulate_pipeline(
    build: Callable[[int], Schedule], chunks: int, network: SimulatedNetwork, placement: Sequence[str], size: float,
    costs: Costs = FREE,
) -> Timing:  # fmt: skip
    """Return the time of a pipeline.

    Args:
        build: makes its schedule for a number of chunks.
        chunks: how many chunks are asked for.
        network: the capacities and ways between places.
        placement: the place of each node.
        size: bytes of the whole vector.
        costs: what messages cost beside their bytes.

    Returns:
        the timing, of method `simulated`; where two short pipelines stand for the long one, `critical` is that of the
        longer of these.

    Raises:
        KeyError: a place that the network does not know or can't reach.
    """
    short = build(min(chunks, ENOUGH))
    if chunks <= ENOUGH or len(short.transfers) * chunks <= MESSAGES * ENOUGH:
        return simulate(build(chunks), network, placement, size, costs)
    piece = size / chunks
    one = simulate(build(FEW), network, placement, piece * FEW, costs)
    two = simulate(short, network, placement, piece * ENOUGH, costs)
    further = (chunks - ENOUGH) / (ENOUGH - FEW)

    def longer(few: float, enough: float) -> float:
        return enough + further * (enough - few)

    seconds = longer(one.seconds, two.seconds)
    scale = chunks / ENOUGH
    loads = tuple(
        LinkLoad(load.link, load.bytes * scale, load.utilisation * scale * two.seconds / seconds) for load in two.loads
    )
    return msgspec.structs.replace(
        two, seconds=seconds, waiting=longer(one.waiting, two.waiting), flowing=longer(one.flowing, two.flowing),
        summing=longer(one.summing, two.summing), loads=loads,
    )  # fmt: skip
