"""A script for torchrun, as its users write it; with ACCELERATE=1 it has one line more."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Dropout(0.1), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
if os.environ.get("NORM") == "1":
    net.insert(1, nn.BatchNorm1d(400))
model = DistributedDataParallel(net, bucket_cap_mb=0.2)
if os.environ.get("ACCELERATE") == "1":
    import psctl

    assert psctl.accelerate_ddp(model) is model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(100 + rank)
for _ in range(int(os.environ.get("STEPS", "20"))):
    x = torch.randn(32, 64)
    optimizer.zero_grad()
    with model.no_sync():  # two backwards a step, of which the second one synchronizes
        F.cross_entropy(model(x[:16]), x[:16, :10].argmax(1)).backward()
    F.cross_entropy(model(x[16:]), x[16:, :10].argmax(1)).backward()
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", "0")))
for each in net.modules():
    if isinstance(each, nn.BatchNorm1d):
        print(f"running values {float(each.running_mean.double().abs().sum()):.9f}", flush=True)
if rank == 0:
    total = sum(float(each.detach().double().abs().sum()) for each in model.parameters())
    print(f"parameters {total:.9f}", flush=True)
dist.destroy_process_group()
