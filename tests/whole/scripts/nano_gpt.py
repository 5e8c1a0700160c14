"""The API use of nanoGPT's training script: RANK decides on DDP, require_backward_grad_sync accumulates.

A small transformer learns letters; gradients accumulate over micro-batches, are clipped, the learning rate is warmed
up, and rank 0 writes a checkpoint with torch.save.
"""

import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ACCUMULATED, CONTEXT, BATCH = 6, 4, 16, 8
TEXT = "a loss is printed only where it is equal on all launchers. " * 40
LETTERS = sorted(set(TEXT))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        heads = [each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=2)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Letters(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        self.token.weight = self.head.weight

    def forward(self, x, y):
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    assert ACCUMULATED % world == 0
    accumulated, offset = ACCUMULATED // world, rank
else:
    accumulated, offset = ACCUMULATED, 0
master = offset == 0
torch.manual_seed(1337 + offset)
data = torch.tensor([LETTERS.index(letter) for letter in TEXT])


def get_batch():
    at = torch.randint(len(data) - CONTEXT, (BATCH,))
    return torch.stack([data[i : i + CONTEXT] for i in at]), torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in at])


torch.manual_seed(0)  # the same start values everywhere; DDP copies rank 0's anyway
model = Letters()
torch.manual_seed(1337 + offset)
decay = [each for each in model.parameters() if each.dim() >= 2]
other = [each for each in model.parameters() if each.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
scaler = torch.amp.GradScaler("cpu", enabled=False)
if ddp:
    model = DDP(model)
raw = model.module if ddp else model
x, y = get_batch()
for step in range(1, STEPS + 1):
    rate = 1e-2 * step / 2 if step < 2 else 1e-3 + 0.5 * (1 + math.cos(math.pi * step / STEPS)) * 9e-3
    for group in optimizer.param_groups:
        group["lr"] = rate
    for micro in range(accumulated):
        if ddp:
            model.require_backward_grad_sync = micro == accumulated - 1
        with nullcontext():
            loss = model(x, y) / accumulated
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master:
        print(f"step {step} loss {loss.item() * accumulated:.6f} norm {float(norm):.6f}", flush=True)
if master:
    place = Path("out")
    place.mkdir(exist_ok=True)
    torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}, place / "ckpt.pt")
    total = sum(float(each.double().abs().sum()) for each in torch.load(place / "ckpt.pt")["model"].values())
    print(f"loss of the last step is in out/ckpt.pt, parameters {total:.6f}", flush=True)
if ddp:
    destroy_process_group()
