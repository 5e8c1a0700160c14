"""Every strategy between real processes: sums over Gloo at many lengths, and training to the same parameters.

The processes are started once (`gloo_world.py`); each test looks at a part of what they wrote.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from psctl.types import STRATEGIES
from tests.helpers.running import ROOT

WORLD = 4
PLAYED = tuple(name for name in STRATEGIES if name not in ("native", "ps"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(WORLD):
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.helpers.gloo_world", str(folder / f"{rank}.json")],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        for process in processes:
            out, _ = process.communicate(timeout=110)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", PLAYED)
def test_sums_are_right_and_the_same_on_every_rank(ranks: list[dict[str, Any]], name: str) -> None:
    found = [each["sums"][name] for each in ranks]
    assert all(each["right"] for each in found)
    assert {each["bits"] for each in found} == {found[0]["bits"]}


@pytest.mark.parametrize("name", [name for name in PLAYED if name != "cpu"])
def test_a_steps_messages_may_go_in_one_batch(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(each["batched"][name] for each in ranks)


@pytest.mark.parametrize("name", ["native", *PLAYED])
def test_training_takes_the_trajectory_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    found = [each["trained"][name] for each in ranks]
    assert all((each["values"], each["norms"]) == (found[0]["values"], found[0]["norms"]) for each in found)
    assert (found[0]["strategy"], found[0]["step"]) == (name, 12)
    alone = ranks[0]["alone"]
    assert (alone["strategy"], alone["step"]) == ("alone", 12)
    one, other = ([float.fromhex(number) for number in each["values"]] for each in (found[0], alone))
    off = [left - right for left, right in zip(one, other, strict=True)]
    assert math.hypot(*off) <= 1e-12 * math.hypot(*other)
    assert all(abs(gap) <= 1e-9 * max(1.0, abs(value)) for gap, value in zip(off, other, strict=True))


@pytest.mark.parametrize("name", ["native", "ring"])
def test_with_a_period_ranks_step_alone_and_then_synchronize(ranks: list[dict[str, Any]], name: str) -> None:
    """12 steps in periods of 5 end at 5, 10 and the last."""
    found, joint = ([each[kind][name] for each in ranks] for kind in ("apart", "trained"))
    assert all(each["values"] == found[0]["values"] for each in found)
    assert found[0]["norms"] != found[1]["norms"]
    assert found[0]["values"] != joint[0]["values"]
    assert [each["moved"] * 4 for each in found] == [each["moved"] for each in joint]


def test_bytes_are_counted_by_what_the_schedule_sends(ranks: list[dict[str, Any]]) -> None:
    moved = {name: [each["trained"][name]["moved"] for each in ranks] for name in ("native", "ring", "root")}
    assert moved["ring"] == moved["native"]
    assert moved["root"][0] == 3 * moved["root"][1], "rank 0 sends the sum to three, the others their vector to one"


def test_nothing_is_left_running(ranks: list[dict[str, Any]]) -> None:
    assert all(each["threads"] == [] for each in ranks)


def test_a_lost_rank_ends_a_sum_at_once(ranks: list[dict[str, Any]]) -> None:
    assert "loss" not in ranks[-1], "it died"
    for each in ranks[:-1]:
        assert (each["loss"]["code"], each["loss"]["threads"]) == ("peer-lost", [])
        assert each["loss"]["seconds"] < 5


def test_ranks_that_share_a_gpu_find_it_and_sum_on_the_host(ranks: list[dict[str, Any]]) -> None:
    assert all(each["gpus"] == [[1, 3], None, "cpu", [4.0, 4.0, 4.0]] for each in ranks)
