"""The times of parameter servers on equal machines: dedicated, co-located, split over spare machines, in racks.

m workers push N bytes each to n servers that hold equal shards, sum, and give the sum back. A port carries B bytes/s in
each direction.

    one after the other    2 max(N / B_w, m N s / B_s) + m N s gamma       s: part of the bytes on the busiest server,
    push and pull at once    max(N / B_w, m N s / B_s)                     1/n when shards are even
    on the workers         2 (P-1)/P N / B                                 m = n = P: the bytes of a ring

So one server takes O(m), n servers O(m / n), as many servers as workers a constant time.

Split over k spare machines (Jiang and others, BytePS, OSDI 2020, theorem 1): with D = n^2 + k n - 2 k, each spare
machine sums 2(n-1)/D of the bytes, each of the n worker machines (n-k)/D, and the time is 2 n (n-1)/D N / B: from the
ring's at k = 0 to N / B at k = n.
"""

from __future__ import annotations

import math

import msgspec

from psctl.plan.allreduce_times import UniformRates


class Split(msgspec.Struct, frozen=True):
    """Parts of the bytes summed on each spare machine and on each worker machine, and the seconds that it takes."""

    spare: float
    worker: float
    seconds: float


class Term(msgspec.Struct, frozen=True):
    """A step of a training iteration's synchronisation."""

    what: str
    seconds: float


def push_then_pull(
    workers: int, servers: int, size: float, rates: UniformRates, server_beta: float | None = None,
    largest: float | None = None, together: bool = False,
) -> float:  # fmt: skip
    """Return the time of a push and a pull through servers on machines of their own.

    Args:
        workers: m.
        servers: n.
        size: bytes a worker pushes.
        rates: of a worker's port; alpha is waited for once a phase.
        server_beta: seconds a byte through a server's port; the workers' when None.
        largest: part of the bytes on the busiest server; 1/n when None.
        together: some keys are pulled while others are pushed.
    """
    share = 1 / servers if largest is None else largest
    beta = rates.beta if server_beta is None else server_beta
    once = max(size * rates.beta, workers * share * size * beta)
    phases = 1 if together else 2
    return 2 * rates.alpha + phases * once + workers * share * size * rates.gamma


def on_workers(machines: int, size: float, rates: UniformRates) -> float:
    """Return the time when every machine holds a worker and a server: 2 (P-1)/P N beta."""
    part = (machines - 1) / machines * size
    return 2 * rates.alpha + 2 * part * rates.beta + part * rates.gamma


def split(machines: int, spare: int, size: float, bandwidth: float) -> Split:
    """Return BytePS's split of `size` bytes for n worker machines and k spare ones, all ports `bandwidth` bytes/s.

    Raises:
        ValueError: fewer than two worker machines, or more spare ones than those; the caller's fault.
    """
    if machines < 2 or not 0 <= spare <= machines:
        raise ValueError(f"a split needs two machines and at most as many spare ones, not {machines} and {spare}")
    whole = machines * machines + spare * machines - 2 * spare
    seconds = 2 * machines * (machines - 1) / whole * size / bandwidth
    return Split(2 * (machines - 1) / whole, (machines - spare) / whole, seconds)


def rack(workers: int, size: float, worker_bandwidth: float, box_bandwidth: float) -> float:
    """Return the seconds in which a rack's own server box sums its workers' bytes, push and pull at once (Parameter
    Hub): max(N / B_w, w N / B_b)."""
    return max(size / worker_bandwidth, workers * size / box_bandwidth)


def racks_apart(
    racks: int, workers: int, size: float, worker_bandwidth: float, box_bandwidth: float, core_bandwidth: float
) -> tuple[float, float]:
    """Return the seconds of summing in each rack first, and of one flat group of servers on all workers.

    Args:
        racks: r.
        workers: w in each rack.
        size: bytes a worker.
        worker_bandwidth: of a worker's port.
        box_bandwidth: of a rack's server box, all its ports.
        core_bandwidth: between a rack and the others.

    Returns:
        per rack first: that rack's sum, then 2 (r-1)/r N through its uplink; flat: the busier of the workers' ports
        and the rack's uplink, which carries w times as many bytes.
    """
    across = 2 * (racks - 1) / racks * size
    first = rack(workers, size, worker_bandwidth, box_bandwidth) + across / min(core_bandwidth, box_bandwidth)
    own = 2 * (1 - 1 / (racks * workers)) * size / worker_bandwidth
    return first, max(own, workers * across / core_bandwidth)


def seven_steps(
    gpus: int, workers: int, servers: int, size: float, bus: float, port: float, sharded: bool, read: float = 0.0
) -> tuple[Term, ...]:
    """Return the terms of a step of training on several machines with several GPUs each.

    Args:
        gpus: in each machine.
        workers: machines with GPUs.
        servers: machines that hold shards.
        size: bytes of gradients.
        bus: bytes/s of a GPU's lane, and of the machine's one link from its GPUs to its CPU.
        port: bytes/s of a machine's network port.
        sharded: GPUs sum a part each, instead of all on one.
        read: seconds to read a batch.
    """
    inside = (gpus - 1) / gpus * size / bus if sharded else (gpus - 1) * size / bus
    there = max(size / port, workers * size / servers / port)
    return (
        Term("read a batch", read),
        Term("sum over the machine's GPUs", inside),
        Term("GPU to CPU", size / bus),
        Term("CPU to servers", there),
        Term("servers to CPU", there),
        Term("CPU to GPU", size / bus),
        Term("spread over the machine's GPUs", inside),
    )


def servers_needed(parameters: float, bytes_each: float, memory: float, copies: int = 1) -> int:
    """Return how many servers hold a model: parameters with their optimizer's state, `copies` of everything.

    Args:
        parameters: number of them.
        bytes_each: of a parameter and its state: 4 alone in float32, 12 with Adam's two moments.
        memory: bytes of a server that may hold shards.
        copies: 1 and the number of replicas.
    """
    return max(1, math.ceil(parameters * bytes_each * copies / memory))
