"""l1 logistic regression by delayed block proximal gradient with the KKT filter.

It is algorithm 3 of Li and others (OSDI 2014).

Features are cut into blocks. For each block, in an order that changes with each pass, every worker pushes the gradient
and the curvature of its examples; the server steps when all have come (rules.py). A worker is at most --tau blocks
ahead: it goes on before the new weights of the last blocks are there. Coordinates whose weight is zero and whose
gradient is well within the penalty leave the active set: they are neither computed nor sent until the end.
"""

import argparse
import time

import torch
from data import Problem
from rules import ACTIVE, COLUMNS, CURVATURE, GRADIENT, PENALTY, RATE, REGION, THRESHOLD, VIOLATION, WEIGHT, WORKERS

import psctl


class Path:
    """One worker's part of the solution.

    Args:
        run: of the job.
        problem: this worker's examples.
        given: the options.
    """

    def __init__(self, run, problem: Problem, given: argparse.Namespace) -> None:
        self.run, self.problem, self.given = run, problem, given
        self.store = run.store("weights", consistency={"ssp": given.tau})
        self.store.declare(int, shape=(COLUMNS,), dtype=torch.float64, apply="rules:step", initial="rules:start")
        self.sums = run.store("objective", consistency="bsp")
        self.sums.declare("loss", shape=(given.passes + 2,), dtype=torch.float64)
        self.weights = torch.zeros(problem.features, dtype=torch.float64)
        self.region = torch.ones(problem.features, dtype=torch.float64)
        self.active = torch.ones(problem.features, dtype=torch.bool)
        self.odds = torch.ones(len(problem.labels), dtype=torch.float64)  # exp(y w.x) of each example
        self.violation = 0.0
        self.sent = self.waited = 0.0

    def one_pass(self, number: int, threshold: float) -> None:
        """Step every block once."""
        size = -(-self.problem.features // self.given.blocks)
        order = torch.randperm(self.given.blocks, generator=torch.Generator().manual_seed(number))
        pending: list[torch.Tensor] = []
        self.violation = 0.0
        for block in order.tolist():
            start, stop = block * size, min((block + 1) * size, self.problem.features)
            keys = torch.arange(start, stop)[self.active[start:stop]]
            if len(keys):
                self.store.push(keys, self.gradient(start, stop, keys, threshold))
                self.sent += len(keys)
            pending.append(keys)
            began = time.perf_counter()
            self.store.clock()  # waits while others are more than tau blocks behind
            self.waited += time.perf_counter() - began
            if len(pending) > self.given.tau:
                self.take(pending.pop(0))
        for _ in range(self.given.tau):
            self.store.clock()
        for keys in pending:
            self.take(keys)

    def gradient(self, start: int, stop: int, keys: torch.Tensor, threshold: float) -> torch.Tensor:
        """Return what is pushed for these coordinates of a block."""
        feature, example = self.problem.block(start, stop)
        at = feature - start
        wrong = 1 / (1 + self.odds)
        g, u = torch.zeros(2, stop - start, dtype=torch.float64)
        g.index_add_(0, at, -(self.problem.labels * wrong)[example])
        flat = wrong * (1 - wrong)
        u.index_add_(0, at, torch.clamp(flat[example] * self.region[feature].exp(), max=0.25))
        rows = torch.zeros(len(keys), COLUMNS, dtype=torch.float64)
        part = 1.0 / self.run.world
        rows[:, GRADIENT], rows[:, CURVATURE], rows[:, WORKERS] = g[keys - start], u[keys - start], part
        rows[:, PENALTY], rows[:, THRESHOLD], rows[:, RATE] = (
            self.given.penalty * part, threshold * part, self.given.rate * part,
        )  # fmt: skip
        return rows

    def take(self, keys: torch.Tensor) -> None:
        """Take the new weights of a block's coordinates, and apply their changes to the examples."""
        if not len(keys):
            return
        rows = self.store.pull(keys)
        moved = torch.zeros_like(self.weights)
        moved[keys] = rows[:, WEIGHT] - self.weights[keys]
        start, stop = int(keys[0]), int(keys[-1]) + 1
        feature, example = self.problem.block(start, stop)
        change = torch.zeros_like(self.odds).index_add_(0, example, moved[feature])
        self.odds *= (self.problem.labels * change).exp()
        self.weights[keys], self.region[keys] = rows[:, WEIGHT], rows[:, REGION]
        self.active[keys] = rows[:, ACTIVE] > 0
        self.violation = max(self.violation, float(rows[:, VIOLATION].max()))

    def objective(self, number: int) -> float:
        """Return the objective over the examples of all workers."""
        value = torch.zeros(self.given.passes + 2, dtype=torch.float64)
        value[number] = torch.log1p(1 / self.odds).sum()
        self.sums.push("loss", value)
        self.sums.clock()
        return float(self.sums.pull("loss")[number] + self.given.penalty * self.weights.abs().sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--features", type=int, default=10_000)
    parser.add_argument("--penalty", type=float, default=1.5)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--tau", type=int, default=2, help="blocks that a worker may be ahead; 0: in step")
    parser.add_argument("--rate", type=float, default=0.8, help="step size; smaller for a larger tau")
    parser.add_argument("--passes", type=int, default=200, help="at most")
    parser.add_argument("--epsilon", type=float, default=1e-9, help="relative change of the objective at the end")
    parser.add_argument("--filter", type=float, default=10.0, help="of the KKT filter; 0: keep all coordinates")
    given = parser.parse_args()
    run = psctl.init()
    problem = Problem(given.examples, given.features, rank=run.rank, world=run.world)
    path = Path(run, problem, given)
    threshold, before, last_pass, filtered = 1e20, path.objective(0), False, 0.0
    for number in range(1, given.passes + 1):
        path.one_pass(number, threshold)
        value = path.objective(number)
        active = int(path.active.sum())
        filtered = max(filtered, 1 - active / given.features)
        if run.rank == 0:
            print(f"pass {number}: objective {value:.9f}, {active} active, {int((path.weights != 0).sum())} not zero")
        threshold = path.violation / given.examples * given.filter if given.filter else 1e20
        if (before - value) <= given.epsilon * value:
            if last_pass:
                break
            last_pass = True  # all coordinates once more: stop only if this changes nothing
            path.active[:] = True
            threshold = 1e20
        else:
            last_pass = False
        before = value
    if run.rank == 0:
        print(
            f"objective {value:.9f} after {number} passes, {100 * filtered:.1f}% filtered, "
            f"{path.sent / number / given.features:.3f} of the coordinates sent a pass, {path.waited:.2f} s waited",
            flush=True,
        )


if __name__ == "__main__":
    main()
