"""One loop, twice: psctl's (run.prepare, run.loader); with DDP=1 DistributedDataParallel's on the same batches.

Autocast to bfloat16 unless AUTOCAST=0, accumulation over two batches, loader processes, clipping, a bar of tqdm,
TensorBoard; COMPILE=1 compiles the model.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

EPOCHS, BATCH = 3, 16
plain = os.environ.get("DDP") == "1"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if plain:
    torch.distributed.init_process_group("gloo")
else:
    import psctl

    run = psctl.init()
numbers = torch.Generator().manual_seed(1)
x = torch.randn(128, 20, generator=numbers)
data = TensorDataset(x, x[:, :5].argmax(1))
torch.manual_seed(2)
net = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
if plain:
    model = nn.parallel.DistributedDataParallel(net)
    own = [range(first + rank * BATCH // world, first + (rank + 1) * BATCH // world) for first in range(0, 128, BATCH)]
    loader, epochs = DataLoader(data, batch_sampler=own, num_workers=2), range(EPOCHS)
else:
    model, optimizer = run.prepare(net, optimizer)
    loader, epochs = run.loader(data, batch_size=BATCH, shuffle=False, num_workers=2), run.epochs(EPOCHS)
forward = torch.compile(model) if os.environ.get("COMPILE") == "1" else model
writer = SummaryWriter("runs") if rank == 0 else None


def backward(loss, last):
    if last:
        loss.backward()
    else:
        with model.no_sync() if plain else run.accumulate():
            loss.backward()


for epoch in epochs:
    for number, (a, b) in enumerate(tqdm(loader, desc=f"epoch {epoch}", file=sys.stderr, disable=rank != 0)):
        last = number % 2 == 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=os.environ.get("AUTOCAST") != "0"):
            loss = F.cross_entropy(forward(a), b)
        backward(loss / 2, last)
        if rank == 0:
            print(f"batch {epoch * len(loader) + number} loss {loss.item():.7e}", flush=True)
            writer.add_scalar("loss", loss.item(), epoch * len(loader) + number)
        if last:
            if plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                run.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not plain:
                run.report(loss=loss)
if writer is not None:
    writer.close()
if plain:
    torch.distributed.destroy_process_group()
