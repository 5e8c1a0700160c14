"""What is taken for granted until it is measured: rates, latencies, and what a message costs each engine.

A message of an engine costs more than the wire's latency: processes are woken, threads take turns, Python runs. On
links of a gigabit that decides about everything below a megabyte. `bench` measures it and keeps it with the cluster;
until then the figures of ENGINES hold. Most of it is a processor's work, so where ranks have to share processors it
takes as many times as long (`crowd`). They were measured on two cores with 4 kB each: 2 ranks that have a core each, 4
and 8 test hosts that share them.

    gloo    its all-reduce                             0.7 ms in 2 steps,  7 ms in 6, 21 ms in 14 steps of its ring
    psctl   a played exchange between pairs            0.4 ms in 1 step,   2 ms in 2,  6 ms in 3 steps, between hosts;
            a chain, one rank after another            5.6 ms in 14 steps, between hosts;
            4 ranks of one host that share the cores   0.1 ms in 2 steps
    ps      a push and a pull                          1.7 ms with two servers on the same two cores
    gpus    NCCL's few microseconds a step (its own tuning tables); played schedules are driven by Python, a launch each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from psctl.plan.simulation.schedule_timing import Costs, StrategyPace
from psctl.schedule.schedule import Schedule
from psctl.types import STRATEGIES

ASSUMED_RATE = 0.956 * 1e9 / 8
"""Payload bytes/s of a port whose speed nothing tells: 1 Gbit/s less headers at an MTU of 1500."""

LOOPBACK_RATE = 4e9
"""Bytes/s that the processes of one host move between them, all together: sealed sockets, measured on two cores."""

ALPHA = 1e-4
"""Seconds a message between hosts waits beside its bytes: a switch, two kernels, two processes woken."""

ADDING = 1 / 4e9
"""Seconds to add a byte of float32 on one core that others use too."""

ENGINES: Mapping[str, Costs] = {
    "gloo": Costs(alpha=1e-4, overhead=2e-4, gamma=ADDING),
    "psctl": Costs(alpha=1e-4, overhead=1.5e-4, gamma=ADDING),
    "ps": Costs(alpha=4e-4, overhead=2e-4, gamma=ADDING),
}
"""Of processes on CPUs."""

BESIDE = Costs(alpha=3e-5, overhead=1e-5, gamma=ADDING)
"""Of schedules between processes of one host, which read each other's memory."""

BESIDE_PACE = StrategyPace(flowing=0.5)
"""Of their bytes, which no socket carries: 100 MB by 4 ranks takes them under half of what Gloo takes."""

ON_GPUS: Mapping[str, Costs] = {
    "nccl": Costs(alpha=5e-6),
    "psctl": Costs(alpha=2e-5, overhead=1e-5),
    "ps": Costs(alpha=6e-4, overhead=2e-4, gamma=ADDING),
}
"""Where gradients lie on GPUs."""

FREE: Mapping[str, Costs] = {"gloo": Costs(), "nccl": Costs(), "psctl": Costs(), "ps": Costs()}
"""For machines that are described in a file: what is known of them is on their links."""


PACES, WAITS = "paces", "waits"
"""Where, beside engines' costs, stands how much longer strategies' bytes flow, and their messages wait."""

SEVERAL = 4
"""Ranks up to which each processor's messages are simulated one behind the other."""


def side_by_side(costs: Costs, schedule: Schedule, crowd: float = 1.0) -> Costs:
    """Return costs as a schedule meets them, by the look of its first step.

    Where ranks share processors, the work of those that are busy at once takes turns. In simulations of many ranks no
    `overhead` is left: what a rank's messages of one step cost its processor is waited for by each of them. Ranks that
    do the same stay alike so, and simulate a hundred times faster.

    Args:
        costs: of a message when its rank has a processor to itself.
        schedule: who sends what when.
        crowd: ranks for each processor.
    """
    if not costs.overhead:
        return costs
    first = next((step for _, step in schedule.by_step()), ())
    pairs = {(one.source, one.destination, one.lane) for one in first}
    active = len({source for source, _, _ in pairs} | {destination for _, destination, _ in pairs})
    overhead = costs.overhead * max(1.0, crowd * active / schedule.world)
    if schedule.world <= SEVERAL:
        return msgspec.structs.replace(costs, overhead=overhead)
    busy = max(Counter(source for source, _, _ in pairs).values(), default=1)
    return msgspec.structs.replace(costs, alpha=costs.alpha + 2 * busy * overhead, overhead=0.0)


def engine_costs(
    gpus: bool, measured: Mapping[str, Mapping[str, float]], *, beside: bool = False
) -> dict[str, Costs]:  # fmt: skip
    """Return what a message costs each engine.

    Args:
        gpus: gradients lie on GPUs.
        measured: what `bench` found on this cluster, by engine: alpha, overhead, gamma; the rest is taken for granted.
            Under PACES and WAITS are strategies, which `paces_of` reads.
        beside: all ranks are processes of one host.
    """
    found = dict(ON_GPUS if gpus else ENGINES)
    if beside and not gpus:
        found["psctl"] = BESIDE
    for engine, costs in measured.items():
        if engine not in (PACES, WAITS):
            found[engine] = Costs(**{key: value for key, value in costs.items() if key in Costs.__struct_fields__})
    return found


def paces_of(measured: Mapping[str, Mapping[str, float]], *, beside: bool = False) -> dict[str, StrategyPace]:
    """Return by how much strategies differ from their predictions.

    Args:
        measured: as of `engine_costs`.
        beside: all ranks are processes of one host, on CPUs.
    """
    flowing, waiting = measured.get(PACES, {}), measured.get(WAITS, {})
    taken = {name: BESIDE_PACE for name in STRATEGIES if name not in ("native", "ps")} if beside else {}
    return taken | {name: StrategyPace(flowing.get(name, 1.0), waiting.get(name, 1.0)) for name in (*flowing, *waiting)}
