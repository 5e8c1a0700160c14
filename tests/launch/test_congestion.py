"""Congestion controls: what may be asked, what is recommended."""

from __future__ import annotations

import pytest

from psctl.errors import UsageError
from psctl.launch.bench.congestion import compared, controls_of, under
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import KnownCluster
from psctl.spec.cluster import load_cluster


def test_controls_are_names_or_all() -> None:
    assert controls_of(None) == []
    assert controls_of("all") == ["auto", "reno", "cubic", "bbr"]
    assert controls_of("bbr, reno,bbr") == ["bbr", "reno"]
    with pytest.raises(UsageError, match="--congestion vegas: unknown"):
        controls_of("vegas")


@pytest.mark.parametrize(
    ("times", "now", "recommended"),
    [
        ({"auto": [1.0, 1.2, 1.1], "reno": [2.0, 2.0, 0.1]}, "auto", "auto"),
        ({"bbr": [2.0, 2.2, 2.1], "reno": [1.0, 1.1, 1.0]}, "bbr", "reno"),
        ({"bbr": [1.02], "reno": [1.0]}, "bbr", "bbr"),  # not clear
        ({"reno": [1.0], "cubic": [2.0]}, "auto", "reno"),  # what the file says was not measured
    ],
)
def test_another_control_is_recommended_only_where_it_is_clearly_faster(
    times: dict[str, list[float]], now: str, recommended: str
) -> None:
    found = compared(times, now)
    assert (found["now"], found["recommended"]) == (now, recommended)
    assert [one["congestion"] for one in found["measured"]] == list(times)


def test_a_cluster_is_the_same_but_for_its_congestion_control() -> None:
    text = "version: 1\nname: lab\nhosts: [a, b]\n"
    one_host = ChosenCluster(load_cluster(text, "lab.yaml"), KnownCluster("lab", "/lab.yaml", text, 1.0))
    other = under(one_host, "reno")
    assert other.spec.network.congestion == "reno"
    assert other.spec.hosts == one_host.spec.hosts
    assert one_host.spec.network.congestion == "auto"
