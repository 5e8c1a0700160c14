"""A worker of the bench: does the work it is asked for, through `prepare` and `run.store()`, and reports its time."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import psctl

KEYS, WIDTH = 1000, 1024


class Given(torch.autograd.Function):
    """A loss whose gradients are given, without a copy."""

    @staticmethod
    def forward(context: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        context.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> Any:
        return None, *(gradient.detach() for gradient in context.gradients)  # a fresh view: autograd keeps it as .grad


class Work:
    """The kinds of work.

    Args:
        run: psctl's.
        count, length: parameters, and elements of one.
    """

    def __init__(self, run: Any, count: int, length: int) -> None:
        self.rank = run.rank
        model = nn.ParameterList([nn.Parameter(torch.zeros(length)) for _ in range(count)])
        self.parameters = list(model)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        self.gradients = [torch.full((length,), float(index)) for index in range(count)]
        self.store = run.store()
        self.keys = torch.arange(KEYS)
        self.rows = torch.ones(KEYS, WIDTH)
        self.store.wait(self.store.push(self.keys, self.rows))
        self.store.wait(self.store.push("w", self.rows[0]))

    def big(self) -> None:
        """All gradients pushed, their mean back in .grad; they are the same on all ranks, so they stay as they are."""
        for parameter in self.parameters:
            parameter.grad = None
        Given.apply(self.gradients, *self.parameters).backward()  # type: ignore[no-untyped-call]
        last = self.parameters[-1].grad
        assert last is not None
        assert float(last[-1]) == len(self.parameters) - 1

    def call(self) -> None:
        """1,000 keys of 4 KB pushed in one call and pulled in one."""
        self.store.push(self.keys, self.rows)
        self.store.pull(self.keys)

    def each(self) -> None:
        """1,000 keys of 4 KB pushed and pulled one by one, all under way at once."""
        pushed = [self.store.push(key, row) for key, row in enumerate(self.rows)]
        self.store.wait(pushed)
        self.store.wait([self.store.fetch(key) for key in range(KEYS)])

    def named(self) -> None:
        """One tensor of 4 KB pushed and pulled."""
        self.store.push("w", self.rows[0])
        self.store.pull("w")


def serve(control: str, group: str, work: Any) -> None:
    """Do what the bench asks for until it ends."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(control)
        lines = line.makefile("rw")
        print(json.dumps({"group": group, "rank": work.rank, "pid": os.getpid()}), file=lines, flush=True)
        for asked in lines:
            name, repeats = asked.split()
            todo: Callable[[], None] = getattr(work, name)
            began = time.perf_counter()
            for _ in range(int(repeats)):
                todo()
            print(json.dumps((time.perf_counter() - began) / int(repeats)), file=lines, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True, help="Unix socket of the bench")
    parser.add_argument("--group", required=True)
    parser.add_argument("--count", type=int, required=True, help="parameters")
    parser.add_argument("--length", type=int, required=True, help="elements of each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    serve(given.control, given.group, Work(psctl.init(), given.count, given.length))


if __name__ == "__main__":
    main()
