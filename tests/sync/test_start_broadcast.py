"""Start values go from rank 0 to all ranks by the broadcast of the decision, over the connections of the sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psctl.job.training_messages import CollectiveChoice
from psctl.plan.candidates import options_as_data
from psctl.plan.choose import choose
from psctl.plan.collective_choice import CollectivePlanner
from psctl.plan.plan_input import plan_input_of_cluster
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.sync import start_broadcast
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode
from psctl.types import Layout, ParameterInfo
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job
from tests.plan.test_choose import host, order

TREES = ((0, ((0, 1), (1, 2)), 2), (0, ((0, 2), (2, 1)), 1))


class Training:
    """A script whose ranks have other values until `prepare`."""

    def __call__(self, run):
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).double())
        model[0].weight = nn.Parameter(torch.zeros(7, 5).t())  # not contiguous
        with torch.no_grad():
            for number, one in enumerate([*model.parameters(), *model.buffers()]):
                one.copy_((torch.arange(one.numel()).reshape(one.shape) * 7 + 31 * number + 1000 * run.rank) % 101)
            model[0].bias[0] = float("nan") if run.rank else -0.0  # bits count
        before = [one.detach().clone() for one in model.state_dict().values()]
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.dtype == torch.float32], lr=0.1)
        model, optimizer = run.prepare(model, optimizer)
        return before, [one.detach().clone() for one in model.state_dict().values()]


@pytest.mark.parametrize("piece", [64 << 20, 48])
@pytest.mark.parametrize(("hosts", "shared"), [((0, 1, 0), False), ((0, 0, 0), True)])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("packed-trees", ScheduleOptions(trees=TREES, chunks=3)), ("pipelined-chain", ScheduleOptions(chunks=4)),
     ("tree", ScheduleOptions()), ("ring", ScheduleOptions())],
)  # fmt: skip
def test_every_rank_has_the_bits_of_rank_0(tmp_path, monkeypatch, algorithm, options, hosts, shared, piece) -> None:
    monkeypatch.setattr(start_broadcast, "PIECE", piece)
    planes = DyingPlanes(tmp_path, hosts, {}, shared=shared)
    job = Job(workers=3, servers=0, strategy="ring", planes=planes)
    job.start = CollectiveChoice("broadcast", 1000, algorithm, options_as_data(options))
    try:
        found = job.run(Training())
    finally:
        planes.close()
    (wanted, _), *_ = found
    for _, values in found:
        for value, right in zip(values, wanted, strict=True):
            assert value.shape == right.shape
            assert torch.equal(bits(value), bits(right))
    assert not torch.equal(found[1][0][0], wanted[0]), "they were others"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_the_plan_takes_a_broadcast_that_is_faster_than_a_sum() -> None:
    layout = Layout((ParameterInfo("w", (5_000_000,), "float32", 0),), "", ({},))
    hosts = [host(name) for name in "abcd"]
    plan = choose(order(*hosts, strategy="ring"), None, layout, decided=True)
    assert plan.start is not None
    assert plan.start.algorithm in ("packed-trees", "pipelined-chain", "ring")
    sums = catalog.build("ring", 4, ScheduleOptions())
    planner = CollectivePlanner(plan_input_of_cluster(cluster(1e8, 1e8, 1e8, 1e8)))
    assert planner.broadcast_within(sums, 20_000_000, 0.0) is None, "none is that fast"
    for strategy in ("ps", "native"):
        assert choose(order(*hosts, strategy=strategy), None, layout, decided=True).start is None
    assert choose(order(*hosts, strategy="ring"), None, layout, decided=False).start is None


def cluster(*rates: float) -> ClusterGraph:
    names = [f"h{at}" for at in range(len(rates))]
    cables = tuple(Between(name, "network", rate, 1e-4) for name, rate in zip(names, rates, strict=True))
    return ClusterGraph(tuple(HostNode(name, HostGraph()) for name in names), cables)


def test_its_messages_run_between_ranks_that_the_sums_connect() -> None:
    planner = CollectivePlanner(plan_input_of_cluster(cluster(*[1e8] * 5)))
    chain = planner.broadcast_within(catalog.build("chain", 5, ScheduleOptions()), 100_000_000, 60.0)
    assert chain is not None
    assert chain.algorithm == "pipelined-chain", "trees would need other connections"
