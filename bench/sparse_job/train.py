"""Steps of a model with an embedding, by turns: torch's ways, and psctl's. Bytes are what this host's interfaces sent.

ddp-dense     nn.Embedding under DistributedDataParallel: the gradient of all rows is summed
ddp-sparse    nn.Embedding(sparse=True) under DistributedDataParallel: sparse gradients are gathered by Gloo
rpc           nn.Embedding on rank 0, read and stepped through torch.distributed.rpc; the rest as ddp-dense
psctl         psctl.nn.SparseEmbedding
bag, bag-rows SparseEmbeddingBag of one bag for each of `--bags` parts of the batch, added on servers, or on the worker
prefetch      the same, and the rows of the next batch are requested while this one is computed
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import psctl
from psctl.nn import SparseEmbedding, SparseEmbeddingBag

WIDTH, FIELDS = 16, 20
TORCH_KEYS = 10**6
"""The most rows that torch's embeddings are made with here: 64 MB on each rank."""


class Net(nn.Module):
    def __init__(self, embedding: nn.Module | None) -> None:
        super().__init__()
        if embedding is not None:
            self.embedding = embedding
        self.dense = nn.Sequential(nn.Linear(FIELDS * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, keys: Tensor) -> Tensor:
        return self.dense(self.embedding(keys).flatten(1))


def sent() -> int:
    """Return the bytes that the interfaces of this network namespace sent, loopback left out."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split(":") for line in file.readlines()[2:]]
    return sum(int(numbers.split()[8]) for name, numbers in rows if name.strip() != "lo")


class BagNet(nn.Module):
    """A bag of rows for each of some parts of a batch, and a dense layer.

    Args:
        keys: how many are possible.
        bags: their number.
        pool: where rows are added.
    """

    def __init__(self, keys: int, bags: int, pool: str) -> None:
        super().__init__()
        self._bags = bags
        self.embedding = SparseEmbeddingBag(
            keys, WIDTH, mode="sum", pool=pool, optimizer={"name": "sgd", "lr": 0.0001}, name=f"bag-{pool}"
        )
        self.dense = nn.Linear(WIDTH, 1)

    def forward(self, keys: Tensor) -> Tensor:
        return self.dense(self.embedding(keys.reshape(self._bags, -1)))


class RemoteRows:
    """The rows that rank 0 has for all ranks."""

    rows: nn.Embedding
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, keys: int) -> None:
        cls.rows = nn.Embedding(keys, WIDTH, sparse=True)
        cls.optimizer = torch.optim.SGD(cls.rows.parameters(), lr=0.01)

    @classmethod
    def read(cls, keys: Tensor) -> Tensor:
        return cls.rows.weight.detach()[keys]

    @classmethod
    def step(cls, keys: Tensor, gradient: Tensor) -> None:
        cls.rows.weight.grad = torch.sparse_coo_tensor(
            keys[None], gradient, cls.rows.weight.shape, check_invariants=False
        )
        cls.optimizer.step()


def batches(keys: int, count: int, size: int, rank: int) -> list[Tensor]:
    """Return batches of keys: zipf, spread over all possible ones by a hash."""
    numbers = np.random.default_rng(rank)
    drawn = numbers.zipf(1.2, (count, size, FIELDS)).astype(np.uint64)
    spread = (drawn * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
    return list(torch.from_numpy((spread % np.uint64(keys)).astype(np.int64)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, default=10**6)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=5, help="of each, a round")
    arguments.add_argument("--batch", type=int, default=256, help="examples of a worker")
    arguments.add_argument("--compute", type=float, default=0.0, help="seconds that each step computes besides")
    arguments.add_argument("--bags", type=int, default=8, help="of bag and bag-rows")
    arguments.add_argument("--contestants", default="ddp-dense,ddp-sparse,rpc,psctl")
    options = arguments.parse_args()
    wanted = options.contestants.split(",")
    torch.set_num_threads(1)
    run = psctl.init()
    if set(wanted) <= {"bag", "bag-rows"}:
        pool = "worker" if wanted == ["bag-rows"] else "auto"
        ours = BagNet(options.keys, options.bags, pool)
    else:
        ours = Net(SparseEmbedding(options.keys, WIDTH, optimizer={"name": "sgd", "lr": 0.01}))
    ours, our_optimizer = run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.01))
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
    every = batches(options.keys, options.steps, options.batch, run.rank)
    contestants: dict[str, Callable[[], None]] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, ahead: bool = False) -> None:
        for keys, later in zip(every, [*every[1:], None], strict=True):
            if ahead and later is not None:  # as run.loader(keys=) does
                model.embedding.prefetch(later)
            optimizer.zero_grad()
            loss = model(keys).square().mean()
            time.sleep(options.compute)  # as a device computes
            loss.backward()
            optimizer.step()

    if options.keys <= TORCH_KEYS:
        for name, sparse in (("ddp-dense", False), ("ddp-sparse", True)):
            if name not in wanted:
                continue
            net = DistributedDataParallel(Net(nn.Embedding(options.keys, WIDTH, sparse=sparse)), process_group=group)
            steps = torch.optim.SGD(net.parameters(), lr=0.01)
            contestants[name] = lambda net=net, steps=steps: train(net, steps)
        if "rpc" in wanted:
            contestants["rpc"] = remote(options.keys, every, run.rank, run.world, group)
    for name in ("psctl", "prefetch", "bag", "bag-rows"):
        if name in wanted:
            contestants[name] = lambda name=name: train(ours, our_optimizer, name == "prefetch")
    for each in contestants.values():
        each()
    for turn in range(options.rounds):
        for name, each in contestants.items():
            dist.barrier(group)
            before, began = sent(), time.perf_counter()
            each()
            dist.barrier(group)
            line = {
                "turn": turn, "rank": run.rank, "name": name, "seconds": (time.perf_counter() - began) / len(every),
                "sent": (sent() - before) / len(every),
                "distinct": sum(len(keys.unique()) for keys in every) / len(every),
            }  # fmt: skip
            print("measured", json.dumps(line), flush=True)
    dist.barrier(group)
    if "rpc" in contestants:
        rpc.shutdown()


def remote(keys: int, every: list[Tensor], rank: int, world: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a function that trains with the rows on rank 0."""
    card = os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    address = next(each.address for each in psutil.net_if_addrs()[card] if each.family == socket.AF_INET)
    where = [f"tcp://{address}:29671"] if rank == 0 else [None]
    dist.broadcast_object_list(where, 0, group=group)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # else rank 0 waits for another process to open this store
    options = rpc.TensorPipeRpcBackendOptions(init_method=where[0], rpc_timeout=120)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    if rank == 0:
        RemoteRows.make(keys)
    dist.barrier(group)
    net = DistributedDataParallel(Net(None), process_group=group, find_unused_parameters=False)
    dense = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for batch in every:
            dense.zero_grad()
            unique, places = batch.unique(return_inverse=True)
            rows = rpc.rpc_sync("worker0", RemoteRows.read, (unique,)).requires_grad_()
            net.module.embedding = lambda _, rows=rows, places=places: rows[places]
            net(batch).square().mean().backward()
            rpc.rpc_sync("worker0", RemoteRows.step, (unique, rows.grad / world))
            dense.step()

    return train


if __name__ == "__main__":
    main()
