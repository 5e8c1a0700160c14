"""`update: sharded`: ranks that each step a part of the parameters train as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from psctl.errors import UsageError
from psctl.ps.server_optimizers import FIT
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job
from tests.sync.test_run_strategies import alone, assert_close, train

SMALL = 200
"""Bytes of a bucket, of which the model has three."""

OPTIONS: dict[str, dict[str, Any]] = {
    "multi-ring": {"rings": [[[0, 1, 2], 1], [[0, 2, 1], 2]]},
    "hierarchical": {"groups": [[0, 2], [1]], "inner": "sharded"},
    "ring": {"pieces": 2},
}


@contextmanager
def sharded(folder: Path, strategy: str = "sharded", hosts=(0, 1, 0), options=None, **terms) -> Iterator[Job]:
    folder.mkdir(exist_ok=True)
    planes = DyingPlanes(folder, hosts, {})
    try:
        job = Job(len(hosts), 0, strategy=strategy, planes=planes, **({"update": "sharded", "bucket": SMALL} | terms))
        job.options = OPTIONS.get(strategy, {}) if options is None else options
        yield job
    finally:
        planes.close()


@pytest.mark.parametrize(
    "strategy", ["sharded", "ring", "bidirectional-ring", "multi-ring", "halving-doubling", "hierarchical"]
)
def test_ranks_train_as_one_process_does(tmp_path: Path, strategy: str) -> None:
    with sharded(tmp_path, strategy) as job:
        results = job.run(train)
    for result in results:
        assert_close(result, alone(train))


def test_shares_may_be_unequal_and_one_rank_may_own_nothing(tmp_path: Path) -> None:
    with sharded(tmp_path, options={"weights": [3, 0, 1], "pieces": 2}) as job:
        results = job.run(lambda run: train(run, batch=17))
    assert_close(results[1], alone(train, batch=17))


def test_clipping_goes_by_the_joint_norm(tmp_path: Path) -> None:
    with sharded(tmp_path, "ring") as job:
        results = job.run(lambda run: train(run, clip=0.05))
    assert_close(results[1], alone(train, clip=0.05), 1e-9)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "Rprop", "NAdam", "ASGD"])
def test_optimizers_that_fit_servers_fit_ranks(tmp_path: Path, name: str) -> None:
    def script(run):
        return train(run, make=lambda model: FIT[name](model.parameters(), lr=0.01))

    with sharded(tmp_path) as job:
        results = job.run(script)
    assert_close(results[2], alone(script))
