"""What push and pull take between processes of one host: shared memory, the same by sealed TCP, Gloo.

    python bench/shared.py [--rounds 5] [--steps 20] [--megabytes 64]

Two workers and two servers of each contestant are started once and take turns, so that what disturbs the machine
disturbs all alike. psctl's are server processes as an agent starts them, and clients as a worker has them; a step is
push, order, pull and wait of all shards. `in place`: gradients are in the send buffer already; `copied`: they are
copied there first, as from .grad. `sgd`: servers step SGD, the others only sum (`update: worker`). Gloo's workers send
half to each server and receive it back; its servers add nothing. Bytes are payload in both directions, GB are 10^9,
processor seconds are of all four processes, system time included; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from psctl.clock import SystemClock
from psctl.job.messages import AnyMessage, Decision, Join, Leave, Ready, Welcome
from psctl.net.peer import Acceptor, Credentials, dial
from psctl.net.segments import inherited
from psctl.runtime.agent_segments import ChildrensSegments
from psctl.runtime.client import ParameterClient
from psctl.runtime.orders import ENVIRONMENT, ProcessOrders, read_orders, write_orders
from psctl.runtime.sharing import Sharing
from psctl.store.messages import Kinds
from psctl.store.shards import cut
from psctl.wire.authority import issue, make_authority
from psctl.wire.knock import new_secret
from psctl.words import Layout, Member, ParameterInfo, first_assignment

WORLD = 2
GROUP = {
    "lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False,
    "foreach": None, "differentiable": False, "fused": None,
}  # fmt: skip


class Line:
    """A process that is told what to do line by line."""

    def __init__(self, stack: ExitStack, arguments: list[str], environment: dict[str, str], fds: list[int]) -> None:
        one = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=one,
                pass_fds=fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        print(text, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def processor(self) -> float:
        return time.clock_gettime((~self.process.pid) << 3 | 2)  # clock_getcpuclockid(3)


class Contestant:
    """Workers that do steps when told, and all processes whose time counts."""

    def __init__(self, name: str, workers: list[Line], others: list[Line]) -> None:
        self.name, self.workers, self.all = name, workers, [*workers, *others]
        self.rates: list[float] = []
        self.processor: list[float] = []

    def go(self, what: str, steps: int, size: int, *, counts: bool = True) -> None:
        before = sum(line.processor() for line in self.all)
        for line in self.workers:
            line.say(f"{what} {steps}")
        seconds = max(float(line.hear()) for line in self.workers)
        spent = sum(line.processor() for line in self.all) - before
        if counts:
            moved = 2 * WORLD * size * steps / 1e9
            self.rates.append(moved / seconds)
            self.processor.append(spent / moved)


# ---- psctl ---------------------------------------------------------------------------------------------------------


class Coordinator:
    """What servers say to their coordinator, and how to reach them."""

    def __init__(self) -> None:
        self.peers: dict[int, Any] = {}
        self.addresses: dict[int, Any] = {}

    def joined(self, peer: Any) -> None:
        self.peers[peer.member.rank] = peer

    def place(self, peer: Any, message: Any, size: int) -> None:
        return None

    def received(self, peer: Any, message: Any, payload: Any) -> None:
        if isinstance(message, Ready):
            self.addresses[peer.member.rank] = message.address
        elif isinstance(message, Join):
            peer.send(Welcome(WORLD, 0, 0, 1.0))

    def lost(self, peer: Any, error: Exception) -> None:
        pass


def layout_of(count: int, update: str) -> Layout:
    infos = tuple(ParameterInfo(f"p{index}", (count // 16,), "float32", 0) for index in range(16))
    return Layout(infos, "SGD" if update == "server" else "", (GROUP,))


def start_psctl(stack: ExitStack, folder: Path, name: str, count: int, update: str, shares: bool) -> Contestant:
    """Start servers as an agent does, and workers with a client each."""
    authority = make_authority(name, time.time())
    segments, knock = ChildrensSegments(), new_secret()

    def who(member: Member) -> Credentials:
        pair = issue(authority, name, member, time.time())
        return Credentials(name, member, authority.certificate_pem, pair.certificate_pem, pair.key_pem, knock)

    coordinator = Coordinator()
    acceptor = Acceptor("127.0.0.1", None, who(Member("coordinator", 0)), AnyMessage, coordinator)
    stack.callback(acceptor.close)

    def start(member: Member, arguments: list[str]) -> Line:
        me, path = who(member), folder / f"{name}-{member.role}-{member.rank}.json"
        with segments.opened(member) as descriptor:
            orders = ProcessOrders(
                job=name, member=member, world=WORLD, host="here", local_rank=0, coordinator=acceptor.address,
                bind="127.0.0.1", ports=None, authority=me.authority, certificate=me.certificate, key=me.key,
                knock=knock, congestion="auto", error_file="", segments=descriptor if shares else None,
            )  # fmt: skip
            write_orders(path, orders)
            return Line(stack, arguments, {ENVIRONMENT: str(path)}, [descriptor])

    servers = [start(Member("server", rank), ["-m", "psctl.runtime.server"]) for rank in range(WORLD)]
    while len(coordinator.addresses) < WORLD:
        time.sleep(0.05)
    layout = layout_of(count, update)
    shards = cut(layout, WORLD)
    half = len(shards) // WORLD
    owners = [min(index // half, WORLD - 1) for index in range(len(shards))]
    first = first_assignment(owners, [coordinator.addresses[rank] for rank in range(WORLD)])
    decision = Decision("ps", update, layout, shards, first)
    for peer in coordinator.peers.values():
        peer.send(decision)
        stack.callback(peer.send, Leave("the bench is over"))
    addresses = json.dumps([[at.host, at.port] for at in (coordinator.addresses[rank] for rank in range(WORLD))])
    script = [__file__, "--worker", update, str(count), addresses]
    workers = [start(Member("worker", rank), script) for rank in range(WORLD)]
    for line in workers:
        assert line.hear() == "ready\n"
    return Contestant(name, workers, servers)


def be_worker(update: str, count: int, places: str) -> None:
    """Push and pull when told."""
    from psctl.words import Address

    torch.set_num_threads(1)
    orders = read_orders()
    assert orders is not None
    me = Credentials(orders.job, orders.member, orders.authority, orders.certificate, orders.key, orders.knock)
    layout = layout_of(count, update)
    shards = cut(layout, WORLD)
    half = len(shards) // WORLD
    owners = [min(index // half, WORLD - 1) for index in range(len(shards))]
    first = first_assignment(owners, [Address(host, port) for host, port in json.loads(places)])
    client = ParameterClient(
        orders.member, WORLD, Decision("ps", update, layout, shards, first),
        lambda member, at, handler: dial(at, me, member, Kinds, handler), SystemClock(), 20.0,
        sharing=Sharing(inherited(orders.member, orders.segments)),
    )  # fmt: skip
    clock, gradients = 0, torch.randn(count)
    client.start({"float32": torch.zeros(count)} if orders.member.rank == 0 else None)
    pieces = [len(held) for held in client._mind.held]
    print("ready", flush=True)
    for line in sys.stdin:
        what, steps = line.split()
        began = time.perf_counter()
        for _ in range(int(steps)):
            flat = client.sending(clock)["float32"]
            if update == "worker":
                client.pull(clock + 1)
            for index in reversed(range(len(shards))):
                if what == "copied":
                    at = shards[index].range
                    flat[at.start : at.stop].copy_(gradients[at.start : at.stop])
                client.push(clock, index, [True] * pieces[index])
            if update == "server":
                client.step(clock, [GROUP])
                client.pull(clock + 1)
            client.wait(clock + 1)
            clock += 1
        print(time.perf_counter() - began, flush=True)
    client.close("the bench is over")


# ---- Gloo ----------------------------------------------------------------------------------------------------------


def start_gloo(stack: ExitStack, count: int) -> Contestant:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(2 * WORLD)}
    lines = [
        Line(stack, [__file__, "--gloo", str(count)], {**environment, "RANK": str(rank)}, [])
        for rank in range(2 * WORLD)
    ]
    for line in lines:
        assert line.hear() == "ready\n"
    return Contestant("gloo", lines, [])


def be_gloo(count: int) -> None:
    """Send half to each server and receive it back; a server does the other half of that."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), count // WORLD
    others = [(1 - rank // WORLD) * WORLD + index for index in range(WORLD)]
    out, back = [torch.randn(half) for _ in others], [torch.zeros(half) for _ in others]
    dist.barrier()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line.split()[1])):
            first, second = (dist.isend, dist.irecv) if rank < WORLD else (dist.irecv, dist.isend)
            for how in (first, second):
                buffers = out if how is dist.isend else back
                works = [how(buffer, other) for buffer, other in zip(buffers, others, strict=True)]
                for work in works:
                    work.wait()
        print(time.perf_counter() - began, flush=True)


# ---- all -----------------------------------------------------------------------------------------------------------


def memcpy(count: int) -> float:
    """Return what one core copies, in GB/s."""
    one, two = torch.randn(count), torch.zeros(count)
    best = 0.0
    for _ in range(10):
        began = time.perf_counter()
        two.copy_(one)
        best = max(best, 4 * count / 1e9 / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--worker", nargs=3)
    parser.add_argument("--gloo", type=int)
    given = parser.parse_args()
    if given.worker:
        return be_worker(given.worker[0], int(given.worker[1]), given.worker[2])
    if given.gloo:
        return be_gloo(given.gloo)
    count = given.megabytes * 250_000 // 16 * 16
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = start_psctl(stack, folder, "shared", count, "worker", True)
        stepped = start_psctl(stack, folder, "shared-sgd", count, "server", True)
        sealed = start_psctl(stack, folder, "sealed", count, "worker", False)
        gloo = start_gloo(stack, count)
        runs = [
            ("shared memory, in place", shared, "place"), ("shared memory, copied", shared, "copied"),
            ("shared memory, sgd on servers, in place", stepped, "place"), ("sealed TCP, in place", sealed, "place"),
            ("Gloo send/recv", gloo, "gloo"),
        ]  # fmt: skip
        found: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in runs}
        for turn in range(given.rounds + 1):
            for name, contestant, what in runs:
                steps = given.steps if "shared" in name else max(2, given.steps // 4)
                contestant.go(what, steps, 4 * count, counts=turn > 0)
                if turn:
                    found[name].append((contestant.rates[-1], contestant.processor[-1]))
        against = [rate for rate, _ in found["Gloo send/recv"]]
        print(f"one core copies {memcpy(count):.1f} GB/s\n")
        print("| | GB/s | of Gloo | processor s/GB |\n|---|---|---|---|")
        for name, rows in found.items():
            ratio = statistics.median(rate / gloo for (rate, _), gloo in zip(rows, against, strict=True))
            rate, spent = (statistics.median(each) for each in zip(*rows, strict=True))
            print(f"| {name} | {rate:.2f} | {ratio:.2f} | {spent:.3f} |")
    return None


if __name__ == "__main__":
    main()
