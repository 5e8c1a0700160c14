"""Frequent words of a stream too large to count: a count-min sketch, whose counters are rows of the store.

A sketch of depth d and width w has d rows of w counters. A word adds one to a counter of each row, chosen by that
row's hash; its estimate is the least of its counters. With w = e/epsilon and d = ln(1/delta) an estimate is never too
small, and too large by more than epsilon * (all words) with a probability below delta, however many words there are
(Cormode and Muthukrishnan, 2005). Counts are sums, so every worker pushes those of its own part of the stream, and
the counters are on the servers, split by key.
"""

import math

import torch

import psctl

EPSILON, DELTA = 0.001, 0.01
WIDTH, DEPTH = math.ceil(math.e / EPSILON), math.ceil(math.log(1 / DELTA))
WORDS, KINDS, BATCH = 120_000, 50_000, 4_000
PRIME = (1 << 31) - 1


def stream(rank: int, world: int) -> torch.Tensor:
    """Return this rank's part of the words: their numbers, the small ones far more often than others (Zipf's law)."""
    chance = 1 / torch.arange(1, KINDS + 1, dtype=torch.float64)
    numbers = torch.Generator().manual_seed(11)
    return torch.multinomial(chance, WORDS, replacement=True, generator=numbers)[rank::world]


def cells(words: torch.Tensor) -> torch.Tensor:
    """Return the keys of the counters of each word: a column for each row of the sketch."""
    numbers = torch.Generator().manual_seed(7)  # the same hashes on every worker
    a = torch.randint(1, PRIME, (DEPTH,), generator=numbers)
    b = torch.randint(PRIME, (DEPTH,), generator=numbers)
    places = (words[:, None] * a + b) % PRIME % WIDTH  # below 2^31 * 50,000: no overflow of 64 bits
    return places + torch.arange(DEPTH) * WIDTH


def main() -> None:
    run = psctl.init()
    sketch = run.store("sketch", consistency="bsp")
    sketch.declare(int, shape=(), dtype=torch.int64)
    for words in stream(run.rank, run.world).split(BATCH):
        keys, counts = cells(words).flatten().unique(return_counts=True)
        sketch.push(keys, counts)
    sketch.clock()
    asked = torch.arange(KINDS)
    estimates = sketch.pull(cells(asked).flatten()).reshape(KINDS, DEPTH).amin(1)
    exact = torch.bincount(stream(0, 1), minlength=KINDS)  # known here, for the stream is small
    over = estimates - exact
    print(
        f"worker {run.rank}: {WIDTH * DEPTH} counters for {int((exact > 0).sum())} kinds of words; too small: "
        f"{int((over < 0).sum())}; beyond the bound: {float((over > EPSILON * WORDS).double().mean()):.4f}; "
        f"most frequent: {estimates.topk(5).indices.tolist()}"
    )


if __name__ == "__main__":
    main()
