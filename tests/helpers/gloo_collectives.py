"""One rank of a real world on Gloo: each collective by torch.distributed and by a run, on the same tensors.

python gloo_collectives.py FILE     with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import psctl

OPERATIONS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
}  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8)
SHAPES = ((), (0,), (7,), (3, 5), (1000,))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 3, shape, generator=generator).to(dtype)


def main(file: str) -> None:
    run = psctl.init()
    run.barrier()  # connects all, and makes the engine's default group
    rank, world = run.rank, run.world
    differ: list[str] = []

    def compare(what: str, mine: object, theirs: object) -> None:
        many = isinstance(mine, list)
        pairs = list(zip(mine, theirs, strict=True)) if many else [(mine, theirs)]  # type: ignore[call-overload]
        if not all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs):
            differ.append(what)

    group = dist.new_group([0, world - 1])
    for dtype in DTYPES:
        for shape in SHAPES:
            what, root, one = f"{dtype} {list(shape)}", world - 1, values(rank, shape, dtype)
            for name, operation in OPERATIONS.items():
                theirs = one.clone()
                dist.all_reduce(theirs, operation)
                compare(f"all_reduce {name} {what}", run.all_reduce(one.clone(), name), theirs)
                theirs = one.clone()
                dist.reduce(theirs, root, operation)
                mine = run.reduce(one.clone(), name, root)
                if rank == root:
                    compare(f"reduce {name} {what}", mine, theirs)
                if rank in (0, world - 1):
                    theirs = one.clone()
                    dist.all_reduce(theirs, operation, group=group)
                    compare(f"all_reduce of two {what}", run.all_reduce(one.clone(), name, [0, world - 1]), theirs)
            theirs = one.clone()
            dist.broadcast(theirs, root)
            compare(f"broadcast {what}", run.broadcast(one.clone(), root), theirs)
            every = [torch.empty_like(one) for _ in range(world)]
            dist.all_gather(every, one)
            compare(f"all_gather {what}", run.all_gather(one), every)
            dist.gather(one, every if rank == root else None, root)
            mine = run.gather(one, root)
            if rank == root:
                compare(f"gather {what}", mine, every)
            given = [values(10 + each, shape, dtype) for each in range(world)]
            theirs = torch.empty_like(one)
            dist.scatter(theirs, given if rank == root else None, root)
            compare(f"scatter {what}", run.scatter(given if rank == root else None, root), theirs)
            if shape:
                mine = [values(10 * rank + each, shape, dtype) for each in range(world)]
                theirs = torch.empty_like(torch.cat(mine))
                dist.all_to_all_single(theirs, torch.cat(mine))
                compare(f"all_to_all {what}", torch.cat(run.all_to_all(mine)), theirs)
    for plain in ([rank, "text", {"a": None}], b"\0" * 100_000):
        found: list[object] = [None] * world
        dist.all_gather_object(found, plain)
        if found != run.all_gather(plain):
            differ.append(f"all_gather of {plain!r:.20}")
    Path(file).write_text(json.dumps({"differ": differ}))


if __name__ == "__main__":
    main(sys.argv[1])
