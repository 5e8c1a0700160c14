"""Word count while servers are killed: every worker pushes the words of many texts and computes the expected totals.

The texts are made of the turn and the rank, so what is right can be said by anybody. Without `prepare` there are no
steps; with `--consistency bsp` each turn is a clock.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import psctl

WORDS = 300


def text(turn: int, rank: int) -> list[str]:
    return [f"word{(7 * turn + 3 * rank + index * index) % WORDS}" for index in range(50)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--consistency", default="asp")
    options = parser.parse_args()
    run = psctl.init()
    store = run.store("counts", consistency=options.consistency)
    for turn in range(options.turns):
        words = text(turn, run.rank)
        store.push([store.key(word) for word in words], 1)
        store.push("turns", 1.0)
        if options.consistency != "asp":
            store.clock()
        if turn % 10 == 9:
            mine = store.pull([store.key(word) for word in words])
            assert (mine >= 1).all()
            print(f"turn {turn}", flush=True)
        time.sleep(options.pause)
    store.flush()
    store.push("ended", 1.0).wait()
    while store.pull("ended") < run.world:  # all have pushed all
        if options.consistency != "asp":
            store.clock()
        time.sleep(0.02)
    right = Counter(word for turn in range(options.turns) for rank in range(run.world) for word in text(turn, rank))
    names = sorted(right)
    found = store.pull([store.key(name) for name in names]).flatten().tolist()
    wrong = {name: (count, right[name]) for name, count in zip(names, found, strict=True) if count != right[name]}
    print(f"turns {store.pull('turns').item():.0f}, wrong {len(wrong)} of {len(names)}", flush=True)


if __name__ == "__main__":
    main()
