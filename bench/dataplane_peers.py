"""One process of a peer that does the same work: Gloo's send and recv, torch RPC over TCP, Ray, plain sockets.

    python bench/dataplane_peers.py gloo|rpc|ray|socket RANK WORKERS SERVERS PORT CONTROL NAME

Ranks 0 .. WORKERS-1 are workers. A vector lies in equal parts on all servers, which return the sum of
all pushes. All memory is allocated before; torch has one thread.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

sys.path.append(str(Path(__file__).resolve().parent / "dataplane_job"))

from train import KEYS, WIDTH, serve

BIG = 16 << 20
"""Elements of a large vector."""
SIZES = {"big": BIG, "call": KEYS * WIDTH}
CHUNK = 512 << 10


class Gloo:
    """A worker. The size of each push is sent to the servers first: they receive and send the same in turn."""

    def __init__(self, rank: int, workers: int, servers: int) -> None:
        self.rank = rank
        self._servers = range(workers, workers + servers)
        self._vectors = {name: torch.ones(size).chunk(servers) for name, size in SIZES.items()}

    def _go(self, name: str) -> None:
        parts = self._vectors[name]
        for to in self._servers:
            dist.send(torch.tensor([parts[0].numel()]), to)
        sent = [dist.isend(part, to) for part, to in zip(parts, self._servers, strict=True)]
        got = [dist.irecv(part, to) for part, to in zip(parts, self._servers, strict=True)]
        for work in [*sent, *got]:
            work.wait()

    def big(self) -> None:
        self._go("big")

    def call(self) -> None:
        self._go("call")


def gloo_server(workers: int) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    buffers = [torch.ones(BIG) for _ in range(workers)]
    while True:
        for rank in range(workers):
            dist.recv(size, rank)
        parts = [buffer[: int(size)] for buffer in buffers]
        for work in [dist.irecv(part, rank) for rank, part in enumerate(parts)]:
            work.wait()
        for part in parts[1:]:
            parts[0] += part
        parts[0] /= workers
        for work in [dist.isend(parts[0], rank) for rank in range(workers)]:
            work.wait()


HELD: dict[Any, torch.Tensor] = {}
"""What a server of torch RPC holds."""


def rpc_push(key: Any, value: torch.Tensor) -> None:
    if key in HELD:
        HELD[key] += value
    else:
        HELD[key] = value.clone()


def rpc_pull(key: Any) -> torch.Tensor:
    return HELD[key]


class Rpc:
    """A worker."""

    def __init__(self, rank: int, workers: int, servers: int) -> None:
        self.rank, self._servers = rank, [f"server{index}" for index in range(servers)]
        self._vectors = {name: torch.ones(size).chunk(servers) for name, size in SIZES.items()}
        self._rows = [row.clone() for row in torch.ones(KEYS, WIDTH)]

    def _go(self, name: str) -> None:
        pairs = list(zip(self._servers, self._vectors[name], strict=True))
        for future in [rpc.rpc_async(server, rpc_push, (name, part)) for server, part in pairs]:
            future.wait()
        for future in [rpc.rpc_async(server, rpc_pull, (name,)) for server, _ in pairs]:
            future.wait()

    def big(self) -> None:
        self._go("big")

    def call(self) -> None:
        self._go("call")

    def each(self) -> None:
        count = len(self._servers)
        pushed = [rpc.rpc_async(self._servers[k % count], rpc_push, (k, row)) for k, row in enumerate(self._rows)]
        for future in pushed:
            future.wait()
        for future in [rpc.rpc_async(self._servers[k % count], rpc_pull, (k,)) for k in range(KEYS)]:
            future.wait()

    def small(self) -> None:
        rpc.rpc_sync(self._servers[0], rpc_push, (0, self._rows[0]))
        rpc.rpc_sync(self._servers[0], rpc_pull, (0,))


class RayServer:
    """An actor. Arrays come in and go out through Ray's shared memory, where large ones are read without a copy."""

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}

    def push(self, key: Any, value: Any) -> None:
        if key in self._held:
            self._held[key] += value
        else:
            self._held[key] = value.copy()

    def pull(self, key: Any) -> Any:
        return self._held[key]


class Ray:
    """A driver; worker 0 makes the actors."""

    def __init__(self, rank: int, servers: int, port: int) -> None:
        import ray

        self.rank, self._get = rank, ray.get
        wait_for(port)
        ray.init(f"127.0.0.1:{port}", namespace="bench", log_to_driver=False, logging_level="ERROR")
        made = ray.remote(num_cpus=1)(RayServer)
        self._servers = [made.options(name=f"server{k}", get_if_exists=True).remote() for k in range(servers)]
        self._vectors = {name: [part.numpy() for part in torch.ones(n).chunk(servers)] for name, n in SIZES.items()}
        self._rows = list(torch.ones(KEYS, WIDTH).numpy())

    def _go(self, name: str) -> None:
        pairs = list(zip(self._servers, self._vectors[name], strict=True))
        self._get([server.push.remote(name, part) for server, part in pairs])
        self._get([server.pull.remote(name) for server, _ in pairs])

    def big(self) -> None:
        self._go("big")

    def call(self) -> None:
        self._go("call")

    def each(self) -> None:
        count = len(self._servers)
        self._get([self._servers[key % count].push.remote(key, row) for key, row in enumerate(self._rows)])
        self._get([self._servers[key % count].pull.remote(key) for key in range(KEYS)])

    def small(self) -> None:
        self._get(self._servers[0].push.remote(0, self._rows[0]))
        self._get(self._servers[0].pull.remote(0))


def ray_head(port: int, cores: int) -> None:
    """Run Ray's own processes; the actors are among their children."""
    words = ["--head", "--block", "--port", port, "--num-cpus", cores, "--include-dashboard", "false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *map(str, words), "--disable-usage-stats"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


HEAD = struct.Struct("<cI")


class Socket:
    """A worker over open sockets: blocking, received in place; a thread a server."""

    def __init__(self, rank: int, workers: int, servers: int, port: int) -> None:
        self.rank = rank
        self._lines = [connected(port + index) for index in range(servers)]
        vectors = {name: torch.ones(size).chunk(servers) for name, size in SIZES.items()}
        self._parts = {name: [memoryview(part.numpy()).cast("B") for part in parts] for name, parts in vectors.items()}
        self._row = memoryview(torch.ones(WIDTH).numpy()).cast("B")

    def _go(self, name: str) -> None:
        pairs = zip(self._lines, self._parts[name], strict=True)
        each = [threading.Thread(target=push_and_pull, args=pair) for pair in pairs]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()

    def big(self) -> None:
        self._go("big")

    def call(self) -> None:
        self._go("call")

    def echo(self) -> None:
        line = self._lines[0]
        line.sendmsg([HEAD.pack(b"e", len(self._row)), self._row])
        fill(line, self._row)

    def small(self) -> None:
        line = self._lines[0]
        line.sendmsg([HEAD.pack(b"a", len(self._row)), self._row])
        line.recv(1)
        line.sendall(HEAD.pack(b"g", len(self._row)))
        fill(line, self._row)


def push_and_pull(line: socket.socket, part: memoryview) -> None:
    line.sendmsg([HEAD.pack(b"s", len(part))])
    line.sendall(part)
    fill(line, part)


def fill(line: socket.socket, view: memoryview) -> None:
    while view:
        view = view[line.recv_into(view) :]


def socket_server(port: int, workers: int) -> None:
    listening = socket.create_server(("127.0.0.1", port), backlog=16)
    sums = {size: torch.zeros(size) for size in {size // part for size in SIZES.values() for part in (1, 2)}}
    meet, lock = threading.Barrier(workers), threading.Lock()

    def one() -> None:
        line, _ = listening.accept()
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer, row = torch.empty(CHUNK // 4), torch.zeros(WIDTH)
        head, view = memoryview(bytearray(HEAD.size)), memoryview(buffer.numpy()).cast("B")
        while True:
            fill(line, head)
            what, size = HEAD.unpack(head)
            if what == b"g":
                line.sendall(row.numpy())
                continue
            if what != b"s":
                fill(line, view[:size])
                row += buffer[: size // 4]
                line.sendall(b"." if what == b"a" else row.numpy())
                continue
            whole = sums[size // 4]
            for start in range(0, size, CHUNK):
                count = min(CHUNK, size - start)
                fill(line, view[:count])
                with lock:
                    whole[start // 4 : (start + count) // 4] += buffer[: count // 4]
            meet.wait()
            line.sendall(whole.numpy())

    threads = [threading.Thread(target=one) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_for(port: int) -> None:
    connected(port).close()


def connected(port: int) -> socket.socket:
    line = socket.socket()
    while line.connect_ex(("127.0.0.1", port)):
        threading.Event().wait(0.05)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def main(kind: str, rank: int, workers: int, servers: int, port: int, control: str, name: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    is_worker, world = rank < workers, workers + servers
    if kind == "gloo":
        dist.init_process_group("gloo", rank=rank, world_size=world)
        serve(control, name, Gloo(rank, workers, servers)) if is_worker else gloo_server(workers)
    elif kind == "rpc":
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"], rpc_timeout=600)
        own = f"worker{rank}" if is_worker else f"server{rank - workers}"
        rpc.init_rpc(own, rank=rank, world_size=world, rpc_backend_options=options)
        serve(control, name, Rpc(rank, workers, servers)) if is_worker else threading.Event().wait()
    elif kind == "ray":
        if is_worker:
            serve(control, name, Ray(rank, servers, port))
        elif rank == workers:
            ray_head(port, world)
    elif is_worker:
        serve(control, name, Socket(rank, workers, servers, port))
    else:
        socket_server(port + rank - workers, workers)


if __name__ == "__main__":
    if len(sys.argv) != 8:
        sys.exit(str(__doc__))
    main(sys.argv[1], *(int(each) for each in sys.argv[2:6]), *sys.argv[6:8])
