"""l1 logistic regression by proximal gradient on the servers: each pass pushes the gradients of all of a worker's keys.

Prints the objective of every fiftieth pass and what the filters have left of the pushes.
"""

import argparse
import json
import time

import torch

import psctl


def problem(examples: int, features: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's part of a seeded problem: the features of each example, and its label of 1 or -1."""
    numbers = torch.Generator().manual_seed(3)
    popular = (torch.rand(examples, 20, generator=numbers, dtype=torch.float64) ** 2 * features).long()
    truth = torch.zeros(features, dtype=torch.float64)
    truth[torch.randperm(features // 4, generator=numbers)[: features // 40]] = 3.0
    chance = torch.sigmoid(truth[popular].sum(dim=1) - 2.0)
    labels = (torch.rand(examples, generator=numbers, dtype=torch.float64) < chance).double() * 2 - 1
    return popular[rank::world], labels[rank::world]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--features", type=int, default=10_000)
    parser.add_argument("--penalty", type=float, default=3.0)
    parser.add_argument("--passes", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--slack", type=float, default=0.0)
    parser.add_argument("--filters", type=json.loads, default=[])
    given = parser.parse_args()
    run = psctl.init()
    features, labels = problem(given.examples, given.features, run.rank, run.world)
    used, places = torch.unique(features, return_inverse=True)
    store = run.store("weights", consistency="bsp")
    rule = {"name": "proximal", "lr": given.rate, "l1": given.penalty, "slack": given.slack}
    store.declare(int, shape=(1,), dtype=torch.float64, optimizer=rule, filters=given.filters)
    sums = run.store("objective", consistency="bsp")
    began = time.perf_counter()
    for number in range(1, given.passes + 1):
        weights = store.pull(used)[:, 0]
        wrong = -labels * torch.sigmoid(-labels * weights[places].sum(dim=1))
        gradient = torch.zeros_like(weights).index_add_(0, places.flatten(), wrong.repeat_interleave(20))
        store.push(used, gradient[:, None])
        store.clock()
        if number % 50 == 0:
            weights = store.pull(used)[:, 0]
            loss = torch.log1p(torch.exp(-labels * weights[places].sum(dim=1))).sum()
            sums.push(f"loss{number}", loss)
            sums.clock()
            total = sums.pull(f"loss{number}")
            _, rows = store.pull(range(given.features))
            if run.rank == 0:
                value = float(total + given.penalty * rows.abs().sum())
                measured = {"pass": number, "objective": value, "not_zero": int((rows != 0).sum())}
                measured |= store.sent() if given.filters else {}
                print("measured " + json.dumps(measured | {"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
