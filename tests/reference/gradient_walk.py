"""Prints which modules of psctl one gradient passes through under `ps`, and in which order: `python -m` this module.

One worker and one server run in this process, over streams in memory: `update: server`, no replica, no compression. A
profile function of every thread notes each call of a function of psctl. After a warm-up two things are recorded:

    step    backward, optimizer step, and the wait for the new values before the next forward
    pull    one request for values that the server has, and the wait for them

A change of module is a call whose module is not that of the previous call on the same thread.

    python -m tests.reference.gradient_walk            # the summary
    python -m tests.reference.gradient_walk --calls    # the calls too, by thread
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import psctl
from psctl.ps.server_optimizers import numbers
from psctl.sync.flat_parameters import FlatParameters
from psctl.sync.ps_sync import ParameterServerSync
from psctl.sync.synchronizer import ExampleWeight
from tests.helpers.ps_world import World, flat_values, make_layout

ROOT = str(Path(psctl.__file__).resolve().parent.parent) + "/"
PACKAGE = f"{ROOT}psctl/"


class Call(NamedTuple):
    """One call of a function of psctl."""

    thread: str
    module: str
    function: str


class Recorder:
    """Notes calls on every thread that starts after `install`, while `recording`."""

    def __init__(self) -> None:
        self.recording = False
        self.calls: list[Call] = []

    def install(self) -> None:
        """Note the calls of this thread and of all threads that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def record(self, action: Callable[[], object]) -> list[Call]:
        """Return the calls of `action`, and of other threads meanwhile."""
        self.calls = []
        self.recording = True
        try:
            action()
        finally:
            self.recording = False
        return self.calls

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.recording and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            module = frame.f_code.co_filename.removeprefix(ROOT).removesuffix(".py").replace("/", ".")
            self.calls.append(Call(threading.current_thread().name, module, frame.f_code.co_qualname))


def modules(calls: list[Call]) -> list[str]:
    """Return the modules in the order in which they were first entered."""
    return list(dict.fromkeys(call.module for call in calls))


def changes(calls: list[Call]) -> int:
    """Return how often a thread's next call is in another module than its last one."""
    last: dict[str, str] = {}
    found = 0
    for call in calls:
        found += last.get(call.thread, call.module) != call.module
        last[call.thread] = call.module
    return found


def walk() -> dict[str, list[Call]]:
    """Return the calls of one step and of one pull."""
    recorder = Recorder()
    recorder.install()
    net = nn.Linear(16, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    layout = make_layout([((4, 16), "float32", 0)], "SGD", numbers(optimizer))
    with World(layout, workers=1, servers=1, target=1 << 20) as world:
        client = world.clients[0]
        world.start(flat_values(layout, [parameter.detach() for parameter in net.parameters()]))
        flat = FlatParameters(layout, world.decision.shards, list(net.parameters()))
        synchronizer = ParameterServerSync(net, ["weight"], optimizer, client, flat, ExampleWeight(1))
        data = torch.ones(2, 16)

        def step() -> None:
            net(data).sum().backward()
            synchronizer.step(lambda: None, save=False)
            synchronizer.wait_newest()

        for _ in range(3):
            optimizer.zero_grad()
            step()
        optimizer.zero_grad()
        client.settle()
        found = {"step": recorder.record(step)}
        client.settle()

        present = flat.fill(client.send_buffer(4), 0)
        client.push(4, 0, present)
        client.step(4, numbers(optimizer))
        client.settle()

        def pull() -> None:
            client.pull(5)
            client.wait(5)

        found["pull"] = recorder.record(pull)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return found


def main() -> None:
    for name, calls in walk().items():
        entered = modules(calls)
        print(f"{name}: {len(entered)} modules, {changes(calls)} changes of module, {len(calls)} calls")
        for module in entered:
            print(f"  {module}")
        if "--calls" in sys.argv:
            for call in calls:
                print(f"    {call.thread:24} {call.module}: {call.function}")


if __name__ == "__main__":
    main()
