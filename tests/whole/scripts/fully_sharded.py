"""FSDP2: fully_shard of each layer over Gloo, with clipping and a checkpoint of torch.distributed.checkpoint."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def built():
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(32, 7))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 32)
        loss = nn.functional.cross_entropy(model(x), x[:, :7].argmax(1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {float(mean) / dist.get_world_size():.6f} norm {float(norm):.6f}", flush=True)


model, optimizer = built()
train(model, optimizer, range(1, 5))
found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(found, checkpoint_id=os.path.abspath("saved"))

model, optimizer = built()
found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.load(found, checkpoint_id=os.path.abspath("saved"))
set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
train(model, optimizer, range(5, 8))
dist.destroy_process_group()
