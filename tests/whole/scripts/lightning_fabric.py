"""Lightning Fabric: launch, setup, setup_dataloaders, no_backward_sync, all_reduce, save and load."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

here, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
fabric = Fabric(accelerator="cpu", devices=here, num_nodes=world // here, strategy="ddp" if world > 1 else "auto",
                precision="bf16-mixed")  # fmt: skip
fabric.launch()
fabric.seed_everything(2, verbose=False)
x = torch.randn(256, 10)
model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True))
for epoch in range(2):
    for number, (a, b) in enumerate(loader):
        waits = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = nn.functional.cross_entropy(model(a), b)
            fabric.backward(loss)
        if not waits:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch} batch {number} loss {float(fabric.all_reduce(loss.detach())):.6f}", flush=True)
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    fabric.load("fabric.ckpt", {"model": model, "optimizer": optimizer})
if world > 1:
    torch.distributed.destroy_process_group()
