"""k-means: each worker assigns its own points, the store joins them by mean; a clock is an iteration.

The row of an integer key is a centre: key = iteration * K + number of the centre. Nobody adds up or divides: that is
what `reduce="mean"` means. A centre that no point chose stays where it was.
"""

import torch

import psctl

K, POINTS, ITERATIONS = 5, 3000, 12


def points(rank: int, world: int) -> torch.Tensor:
    """Return this rank's points, of K clouds that are the same everywhere."""
    numbers = torch.Generator().manual_seed(3)
    clouds = 10 * torch.randn(K, 2, generator=numbers)
    all_of_them = clouds[torch.arange(POINTS) % K] + torch.randn(POINTS, 2, generator=numbers)
    return all_of_them[rank::world]


def spread_out(mine: torch.Tensor) -> torch.Tensor:
    """Return first centres: each the point that is farthest from those before."""
    found = mine[:1]
    while len(found) < K:
        found = torch.cat([found, mine[torch.cdist(mine, found).min(1).values.argmax()][None]])
    return found


def main() -> None:
    run = psctl.init()
    store = run.store("centres", consistency="bsp")
    store.declare(int, shape=(2,), reduce="mean")
    mine = points(run.rank, run.world)
    if run.rank == 0:  # one rank's proposal counts for all
        store.push(range(K), spread_out(mine))
    store.clock()
    centres = store.pull(list(range(K)))
    for iteration in range(1, ITERATIONS + 1):
        nearest = torch.cdist(mine, centres).argmin(1)
        store.push(iteration * K + nearest, mine)  # many points a key: joined before they leave
        store.clock()
        found, rows = store.pull(range(iteration * K, (iteration + 1) * K))  # those that are there
        centres[found - iteration * K] = rows
    distance = torch.cdist(mine, centres).min(1).values.mean()
    print(f"worker {run.rank}: mean distance {distance:.3f}")


if __name__ == "__main__":
    main()
