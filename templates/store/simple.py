"""A parameter server in fifteen lines: asynchronous workers, one vector, no step waits for another worker."""

import torch

import psctl

run = psctl.init()
store = run.store()
store.declare("w", torch.zeros(10), apply="rules:sgd")  # the server's update, as in rules.py
target = torch.arange(10.0)
for _ in range(100):
    w = store.pull("w")
    gradient = w - target  # of half the squared distance
    store.push("w", gradient)
store.flush()
print(f"distance {(store.pull('w') - target).norm():.3f}")
