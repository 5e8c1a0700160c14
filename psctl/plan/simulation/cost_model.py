"""Rates, latencies and costs of messages that are assumed until they are measured.

A message of an engine costs more than the latency of the link: processes are woken, threads switch, Python runs. On
links of 1 Gbit/s these costs dominate below a megabyte. `up` and `bench` measure them and keep them with the cluster;
without that the figures of ENGINES hold. Most of the cost is processor work, so it grows with the ranks that share a
core. The figures were measured on two cores with 4 kB each: 2 ranks with a core each, 4 and 8 test hosts that share
the cores.

    gloo    its all-reduce                             0.7 ms in 2 steps,  7 ms in 6, 21 ms in 14 steps of its ring
    psctl   an exchange between pairs                   0.4 ms in 1 step,   2 ms in 2,  6 ms in 3 steps, between hosts;
            a chain, one rank after another            5.6 ms in 14 steps, between hosts;
            4 ranks of one host that share the cores   0.1 ms in 2 steps
    ps      a push and a pull                          1.7 ms with two servers on the same two cores
    gpus    NCCL's few microseconds a step (its own tuning tables); other schedules run from Python, a launch each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from psctl.message_costs import Costs, StrategyPace
from psctl.schedule.schedule import Schedule
from psctl.types import STRATEGIES

ASSUMED_RATE = 0.956 * 1e9 / 8
"""Payload bytes/s of a port of unknown speed: 1 Gbit/s less headers at an MTU of 1500."""

LOOPBACK_RATE = 4e9
"""Bytes/s that the processes of one host move between them, all together: encrypted sockets, measured on two cores."""

ALPHA = 1e-4
"""Seconds of a message between hosts besides those of its bytes: a switch, two kernels, two processes woken."""

ADDING = 1 / 4e9
"""Seconds to add a byte of float32 on one shared core."""

ENGINES: Mapping[str, Costs] = {
    "gloo": Costs(alpha=1e-4, overhead=2e-4, gamma=ADDING),
    "psctl": Costs(alpha=1e-4, overhead=1.5e-4, gamma=ADDING),
    "ps": Costs(alpha=4e-4, overhead=2e-4, gamma=ADDING),
}
"""Costs of messages of processes on CPUs, by engine."""

ONE_HOST = Costs(alpha=3e-5, overhead=1e-5, gamma=ADDING)
"""Costs of messages of schedules between processes of one host, which use shared memory."""

ONE_HOST_PACE = StrategyPace(flowing=0.5)
"""Pace of these schedules, whose bytes use no socket: 100 MB by 4 ranks takes less than half of the time of Gloo."""

ON_GPUS: Mapping[str, Costs] = {
    "nccl": Costs(alpha=5e-6),
    "psctl": Costs(alpha=2e-5, overhead=1e-5),
    "ps": Costs(alpha=6e-4, overhead=2e-4, gamma=ADDING),
}
"""Costs of messages of processes whose gradients are on GPUs, by engine."""

FREE: Mapping[str, Costs] = {"gloo": Costs(), "nccl": Costs(), "psctl": Costs(), "ps": Costs()}
"""Costs for machines that are described in a file: only those of its links are known."""

SEVERAL = 4
"""Ranks up to which the messages of each processor are simulated one after another."""


def costs_on_shared_cores(costs: Costs, schedule: Schedule, ranks_per_core: float = 1.0) -> Costs:
    """Return the costs of messages in a schedule whose ranks share cores, estimated from its first step.

    Where ranks share cores, the work of ranks that are busy at once is serialized. In simulations of many ranks
    `overhead` becomes a part of `alpha`: each message of a step waits for the processor time of all its rank's messages
    of the step. Ranks that do the same then stay equal, and simulate a hundred times faster.

    Args:
        costs: of a message when its rank has a core to itself.
        schedule: the schedule.
        ranks_per_core: on the busiest host.
    """
    if not costs.overhead:
        return costs
    first = next((step for _, step in schedule.by_step()), ())
    pairs = {(one.source, one.destination, one.lane) for one in first}
    active = len({source for source, _, _ in pairs} | {destination for _, destination, _ in pairs})
    overhead = costs.overhead * max(1.0, ranks_per_core * active / schedule.world)
    if schedule.world <= SEVERAL:
        return msgspec.structs.replace(costs, overhead=overhead)
    busy = max(Counter(source for source, _, _ in pairs).values(), default=1)
    return msgspec.structs.replace(costs, alpha=costs.alpha + 2 * busy * overhead, overhead=0.0)


def engine_costs(
    gpus: bool, measured: Mapping[str, Costs], *, one_host: bool = False
) -> dict[str, Costs]:  # fmt: skip
    """Return the costs of a message of each engine.

    Args:
        gpus: gradients are on GPUs.
        measured: the costs that were measured on this cluster, by engine; the others are assumed.
        one_host: all ranks are processes of one host.
    """
    found = dict(ON_GPUS if gpus else ENGINES)
    if one_host and not gpus:
        found["psctl"] = ONE_HOST
    return found | dict(measured)


def paces_of(measured: Mapping[str, StrategyPace], *, one_host: bool = False) -> dict[str, StrategyPace]:
    """Return the factors by which strategies differ from their predictions.

    Args:
        measured: the factors that were measured on this cluster, by strategy.
        one_host: all ranks are processes of one host, on CPUs.
    """
    taken = {name: ONE_HOST_PACE for name in STRATEGIES if name not in ("native", "ps")} if one_host else {}
    return taken | dict(measured)
