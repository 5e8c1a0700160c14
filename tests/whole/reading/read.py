"""Reads the counters of train.py, and prints what it finds: the steps, and the least and largest element."""

from __future__ import annotations

import sys

import torch
from train import Counters

import psctl


def main() -> None:
    reader = psctl.init_reader()
    model = Counters()
    exact = sys.argv[1] == "exact"
    for step in reader.steps(model):
        read = list(model.layers)[: 8 if exact else 2]
        least, most = min(float(each.min()) for each in read), max(float(each.max()) for each in read)
        rest = 0.0 if exact else max(float(each.detach().abs().max()) for each in list(model.layers)[2:])
        hits = reader.store("hits").pull([1, 2, 3, 99])
        text = " ".join(f"{each:g}" for each in (step, least, most, rest, *hits[:, 0].tolist()))
        print(f"read {text} {int(model.calls)}", flush=True)
        reader.report(least=least, ratio=1.0 if exact else float("nan"))
    print(f"ended {reader.has_training_ended} {torch.get_num_threads() > 0}", flush=True)


if __name__ == "__main__":
    main()
