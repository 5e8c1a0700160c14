"""Workers that are clocks apart: who may go on, what values they read, and that every value is the law's to the bit."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from psctl.ps.server_optimizers import FIT, numbers
from tests.helpers.job_world import Job
from tests.helpers.ps_world import World, flat_values, make_layout, view_of
from tests.helpers.running import until

_here = Path(__file__)

SHAPES = [((7, 13), "float32", 0), ((301,), "float32", 0), ((5,), "float64", 0)]


def start_values():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape, dtype, _ in SHAPES]


def gradient_of(values, clock, rank):
    generator = torch.Generator().manual_seed(1000 * clock + rank)
    return {
        index: value * 0.5 + torch.randn(value.shape, generator=generator).to(value.dtype)
        for index, value in enumerate(values)
    }


class Runner:
    """One worker of the world, driven a clock at a time."""

    def __init__(self, world, rank) -> None:
        self.world, self.rank, self.client, self.clock = world, rank, world.clients[rank], 0
        self.read: list[int] = []

    def values(self):
        return [self.world.parameter(self.rank, index).clone() for index in range(len(SHAPES))]

    def push(self, values, groups) -> None:
        client, clock = self.client, self.clock
        buffers = client.send_buffer(clock)
        for index, gradient in gradient_of(values, clock, self.rank).items():
            view_of(self.world.layout, buffers, index).copy_(gradient)
        for shard, held in enumerate(self.world.held):
            client.push(clock, shard, [True] * len(held))
        client.step(clock, groups)
        client.pull(clock + 1)
        self.clock += 1


@pytest.mark.parametrize(("name", "staleness", "servers"), [("SGD", 0, 2), ("AdamW", 1, 1), ("AdamW", 3, 2)])
def test_every_value_read_is_a_version_that_the_law_allows_and_equals_one_process_to_the_bit(name, staleness, servers):
    chance = random.Random(staleness)
    ours = [nn.Parameter(value) for value in start_values()]
    optimizer = FIT[name](ours, lr=0.01)
    groups = numbers(optimizer)
    layout = make_layout(SHAPES, name, groups)
    versions = [start_values()]
    pushed: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    with World(layout, 3, servers, target=600, staleness=staleness) as world:
        world.start(flat_values(layout, start_values()))
        runners = [Runner(world, rank) for rank in range(3)]
        while min(one.clock for one in runners) < 12:
            slowest = min(one.clock for one in runners)
            runner = chance.choice([one for one in runners if one.clock <= slowest + staleness and one.clock < 12])
            runner.client.wait(runner.clock)
            shards = range(len(world.decision.shards))
            held = [runner.client.complete_clocks([shard]) for shard in shards]
            assert max(held) <= slowest
            assert min(held) >= runner.clock - staleness
            values = runner.values()
            if len(set(held)) == 1:  # else the shards are of several versions, which the law allows
                assert all(torch.equal(a, b) for a, b in zip(values, versions[held[0]], strict=True))
            runner.read.append(runner.clock - min(held))
            pushed[runner.clock, runner.rank] = gradient_of(values, runner.clock, runner.rank)
            runner.push(values, groups)
            while all((len(versions) - 1, rank) in pushed for rank in range(3)):
                clock = len(versions) - 1
                for index, parameter in enumerate(ours):
                    first, second, third = (pushed[clock, rank][index] for rank in range(3))
                    parameter.grad = (first + second + third) / 3
                optimizer.step()
                versions.append([parameter.detach().clone() for parameter in ours])
        for runner in runners:
            assert max(runner.read) == min(staleness, max(runner.read))
        assert max(max(runner.read) for runner in runners) == staleness  # they were apart, as far as they may be


def test_the_fastest_goes_s_clocks_ahead_and_then_waits_for_the_slowest_by_name(monkeypatch):
    monkeypatch.setattr("psctl.client.server_waits.TICK", 0.02)
    layout = make_layout(SHAPES, "SGD", [{"lr": 0.1}])
    with World(layout, 2, 2, target=600, staleness=2) as world:
        world.start(flat_values(layout, start_values()))
        fast, slow = Runner(world, 0), Runner(world, 1)
        for clock in range(3):
            fast.client.wait(clock)
            assert fast.client.complete_clocks(range(len(world.decision.shards))) == 0
            fast.push(fast.values(), [{"lr": 0.1}])
        waiting = threading.Thread(target=fast.client.wait, args=(3,))
        waiting.start()
        until(lambda: fast.client.activity.endswith("which waits for worker/1"))
        assert waiting.is_alive()
        slow.push(slow.values(), [{"lr": 0.1}])
        waiting.join(10)
        assert fast.client.complete_clocks(range(len(world.decision.shards))) == 1


def test_a_wait_for_everyones_clocks_takes_in_what_has_landed_meanwhile():
    layout = make_layout(SHAPES, "SGD", [{"lr": 0.1}])
    with World(layout, 2, 2, target=600, staleness=2) as world:
        world.start(flat_values(layout, start_values()))
        fast, slow = Runner(world, 0), Runner(world, 1)
        shards = range(len(world.decision.shards))
        for clock in range(2):
            fast.client.wait(clock)
            fast.push(fast.values(), [{"lr": 0.1}])
        slow.push(slow.values(), [{"lr": 0.1}])
        until(lambda: all(fast.client._state._received.each[shard].version == 1 for shard in shards))  # and not shown
        waiting = threading.Thread(target=fast.client.wait, args=(2,), kwargs={"exact": True})
        waiting.start()
        slow.client.wait(1)
        slow.push(slow.values(), [{"lr": 0.1}])
        waiting.join(10)
        assert fast.client.complete_clocks(shards) == 2


def test_a_script_trains_with_workers_apart_and_reports_the_staleness_of_its_values():
    held_back, ahead = threading.Event(), threading.Event()

    def script(run):
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
        data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        seen = 0
        for _ in run.epochs(1):
            for x in run.loader(list(data), batch_size=8):
                seen += len(x)
                if run.rank == 1 and run.step == 2:
                    assert held_back.wait(10)
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                scheduler.step()
                if run.rank == 0 and run.step == 4:  # steps 3 and 4 without the other's
                    ahead.set()
                    held_back.set()
        run.wait()
        return seen, run.step, optimizer.param_groups[0]["lr"]

    job = Job(workers=2, servers=2, staleness=2)
    found = job.run(script)
    assert ahead.is_set()
    assert found == [(32, 8, 0.025), (32, 8, 0.025)]
    assert max(report.staleness for _, report in job.reports) <= 2
    assert set(job.saved) == {8}
