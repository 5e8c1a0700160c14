"""Logistic regression by stochastic gradient descent: each worker has its own examples, the weights are in the store.

Workers are at most two clocks apart (stale synchronous parallel). `python sgd.py bsp` keeps them together.
"""

import sys

import torch

import psctl

FEATURES, EXAMPLES, STEPS, BATCH = 20, 2000, 150, 50


def examples(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's examples of one problem that is the same everywhere."""
    numbers = torch.Generator().manual_seed(7)
    truth = torch.randn(FEATURES, generator=numbers)
    x = torch.randn(EXAMPLES, FEATURES, generator=numbers)
    y = (x @ truth > 0).float()
    return x[rank::world], y[rank::world]


def main() -> None:
    run = psctl.init()
    consistency = sys.argv[1] if len(sys.argv) > 1 else {"ssp": 2}
    store = run.store("weights", consistency=consistency, reads="eager")
    store.declare("w", torch.zeros(FEATURES), apply="rules:sgd")
    x, y = examples(run.rank, run.world)
    for step in range(STEPS):
        at = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        w = store.pull("w")
        wrong = torch.sigmoid(x[at] @ w) - y[at]
        store.push("w", x[at].T @ wrong / run.world)  # under bsp the sum of a clock is applied, else each push
        store.clock()
    store.call("rules:shrink", "w", by=1.0)  # functions run where the rows are; 1.0 shrinks nothing
    store.flush()
    right = ((x @ store.pull("w") > 0).float() == y).float().mean()
    print(f"worker {run.rank}: accuracy {right:.3f}")


if __name__ == "__main__":
    main()
