"""The parameters of a run."""

from __future__ import annotations

from psctl.job.run_parameters import options_of, parameters_of
from tests.helpers.orders import make_hosts, make_order


def test_the_scripts_options_and_how_psctl_runs_it() -> None:
    order = make_order(make_hosts(2, 1), argv=["train.py", "--lr", "0.1", "--amp", "--seed=3", "data"], servers=None)
    assert parameters_of(order) == {
        "script": "train.py --lr 0.1 --amp --seed=3 data", "hosts": 2, "workers": 3, "servers": "auto",
        "strategy": "ps", "update": "server", "seed": 0, "args/lr": "0.1", "args/amp": "true", "args/seed": "3",
    }  # fmt: skip


def test_options_with_and_without_values() -> None:
    assert options_of(["--a", "--b", "-1", "x", "--", "--c"]) == {"a": "true", "b": "-1", "c": "true"}
    assert options_of(["plain", "-s", "1"]) == {}
