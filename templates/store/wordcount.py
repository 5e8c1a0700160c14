"""Word count, as MapReduce: mapping is what workers do, shuffling is the keys' hash, reducing is the push.

Any reduction that does not care for order will do: here words are counted by sum, and the longest line is found by max.
The text is what lies in this folder, one file in turn for each worker.
"""

import re
from collections import Counter
from pathlib import Path

import torch

import psctl


def main() -> None:
    run = psctl.init()
    counts = run.store("counts", consistency="bsp")
    longest = run.store("longest", consistency="bsp")
    files = sorted(Path(__file__).parent.glob("*.py"))[run.rank :: run.world]
    words: Counter[str] = Counter()
    for file in files:
        text = file.read_text()
        found = re.findall(r"[a-z]+", text.lower())
        words.update(found)
        counts.push([counts.key(word) for word in found], 1)  # one row a key: a number
        longest.push("line", max(len(line) for line in text.splitlines()), reduce="max")
    if not files:  # more workers than files: a clock needs everyone
        longest.declare("line", shape=(), dtype=torch.int64, reduce="max")
        counts.declare(int, shape=(), dtype=torch.int64)
    counts.clock()
    longest.clock()
    known = sorted(words)
    total = counts.pull([counts.key(word) for word in known]).tolist()
    top = sorted(zip(total, known, strict=True), reverse=True)[:5]
    print(f"worker {run.rank}: {', '.join(f'{word} {count}' for count, word in top)}; line {longest.pull('line')}")


if __name__ == "__main__":
    main()
