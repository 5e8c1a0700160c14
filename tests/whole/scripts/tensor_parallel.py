"""Tensor parallelism over Gloo: parallelize_module with column-wise and row-wise layers and sequence-parallel norms."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(5)
model = Feed()
parallelize_module(
    model, mesh,
    {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    },
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(1, 7):
    torch.manual_seed(
        step
    )  # all ranks of a tensor-parallel group have the same batch; each takes a part of the sequence
    x = torch.randn(4, 8, 32)
    out = model(x.chunk(world, dim=1)[rank].contiguous())
    loss = (out - x.flip(2)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
