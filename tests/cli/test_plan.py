"""psctl plan: machines that one does not have, from a file; every strategy, the choice, the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psctl.types import STRATEGIES
from tests.cli import inside

ROOT = Path(__file__).resolve().parents[2]

MATRIX = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tPIX\tPIX\tPIX\t0-7
GPU1\tPIX\t X \tPIX\tPIX\t0-7
GPU2\tPIX\tPIX\t X \tPIX\t0-7
GPU3\tPIX\tPIX\tPIX\t X \t0-7
"""

JOB = "version: 1\nname: j\nscript: t.py\nsync: {strategy: %s}\n"


def psctl(home: Path, *words: str, code: int = 0) -> inside.Told:
    return inside.psctl(home, *words, code=code, cwd=ROOT, NO_COLOR="1")


def planned(home: Path, *words: str) -> dict[str, Any]:
    return json.loads(psctl(home, "plan", *words, "-o", "json").stdout)  # type: ignore[no-any-return]


def hosts(rate: dict[str, float], roles: dict[str, list[str]] | None = None) -> str:
    return json.dumps(
        {
            "hosts": [
                {"name": name, "devices": [], "links": [], **({"roles": roles[name]} if name in (roles or {}) else {})}
                for name in rate
            ],
            "between": [{"a": name, "b": "network", "bandwidth": each, "latency": 0} for name, each in rate.items()],
        }
    )


def test_the_box_of_the_texts_from_a_saved_matrix(tmp_path: Path) -> None:
    """160 MB on four GPUs behind a switch: 60 ms on one of them, 80 ms on the processor, 15 ms sharded."""
    file = tmp_path / "m.txt"
    file.write_text(MATRIX)
    document = planned(tmp_path, "--topology", str(file), "--size", "160MB")
    assert list(document) == ["size", "world", "chosen", "reason", "decided", "candidates", "by_size"]
    assert (document["size"], document["world"], document["decided"]) == (160_000_000, 4, False)
    assert sorted(row["strategy"] for row in document["candidates"]) == sorted(STRATEGIES)
    assert document["candidates"][0]["strategy"] == document["chosen"]
    found = {row["strategy"]: row["seconds"] for row in document["candidates"]}
    times = (found["root"], found["cpu"], found["sharded"])
    assert times == pytest.approx((0.060, 0.080, 0.015), rel=0.01)


def test_a_cluster_that_is_written_down(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(hosts({"a": 1e9, "b": 1e9, "c": 2e8, "d": 1e9}))
    document = planned(tmp_path, "--topology", str(file), "--size", "1GB")
    best = document["candidates"][0]
    assert set(best) == {
        "strategy", "params", "seconds", "steps", "bytes_per_rank", "bottleneck", "feasible", "why_not",
    }  # fmt: skip
    assert 5.0 <= best["seconds"] < 7.5 / 1.4
    assert "c -> network" in document["reason"] or "network -> c" in document["reason"]


def test_steps_are_compared_and_explained_where_their_compute_is_given(tmp_path: Path) -> None:
    nodes = "clusters/two-gpu-nodes.json"
    words = ("--topology", nodes, "--size", "400MB", "--explain", "ps")
    document = planned(tmp_path, *words, "--compute", "250ms")
    rows = {row["strategy"]: row for row in document["candidates"]}
    assert rows["ps"]["step_seconds"] < 0.25 + rows["ps"]["seconds"]
    assert "step_seconds" not in rows["cpu"]
    assert "by_size" not in document
    terms = document["terms"]["terms"]
    assert [each["term"] for each in terms] == [
        "forward and backward", "GPU to host", "sum of a host", "push", "servers' sum", "pull", "host to GPU",
    ]  # fmt: skip
    assert terms[0]["seconds"] == 0.25
    # Four GPUs behind a PCIe switch share its slot to the processor; two hosts exchange half the vector.
    assert terms[1]["seconds"] == terms[6]["seconds"] == pytest.approx(2 * 400e6 / 31.5e9, rel=0.01)
    assert terms[3]["seconds"] == pytest.approx(200e6 / 11.95e9, rel=0.01), "one push a host"
    assert terms[5]["seconds"] == pytest.approx(8 * 200e6 / 11.95e9, rel=0.01), "each of its eight workers pulls"
    text = psctl(tmp_path, "plan", *words, "--compute", "250ms").stdout
    assert "a step" in text
    assert "7. host to GPU" in text
    assert "sum, if nothing overlaps" in text
    plain = planned(tmp_path, *words[:4], "--explain", "hierarchical")
    assert [each["term"] for each in plain["terms"]["terms"]][2:] == ["messages that wait", "bytes on links", "sums"]
    assert plain["terms"]["terms"][0]["seconds"] is None


def test_sums_in_switches_are_a_row_where_there_is_infiniband(tmp_path: Path) -> None:
    file = tmp_path / "ib.json"
    file.write_text((ROOT / "clusters/two-gpu-nodes.json").read_text().replace('"Ethernet"', '"InfiniBand"'))
    document = planned(tmp_path, "--topology", str(file), "--size", "400MB")
    assert document["in_network"]["strategy"] == "SHARP"
    assert document["in_network"]["seconds"] < 400e6 / 11.95e9 + 0.01
    text = psctl(tmp_path, "plan", "--topology", str(file), "--size", "400MB").stdout
    assert "SHARP" in text
    assert "cannot deploy" in text
    assert "in_network" not in planned(tmp_path, "--topology", "clusters/two-gpu-nodes.json", "--size", "400MB")


def test_hosts_behind_the_world_may_serve(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    names = [f"h{index}" for index in range(8)]
    file.write_text(hosts(dict.fromkeys(names, 1e8)))
    document = planned(tmp_path, "--topology", str(file), "--size", "100MB", "--world", "4")
    assert (document["chosen"], document["world"]) == ("ps", 4)
    assert document["candidates"][0]["params"]["hosts"] == names[4:]
    file.write_text(hosts(dict.fromkeys(names, 1e8), {name: ["worker"] for name in names[4:]}))
    document = planned(tmp_path, "--topology", str(file), "--size", "100MB", "--world", "4")
    assert document["chosen"] == "ps"
    assert document["candidates"][0]["params"]["hosts"] == names[:4]


def test_one_host_of_topo_is_enough_and_small_gradients_take_few_steps(tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    gpus = [{"id": f"GPU{index}", "kind": "gpu", "numa": 0} for index in range(4)]
    cables = [{"a": f"GPU{index}", "b": "SW0", "type": "PCIe", "bandwidth": 16e9} for index in range(4)]
    switch = {"id": "SW0", "kind": "switch", "numa": None}
    file.write_text(json.dumps({"devices": [*gpus, switch], "links": cables}))
    document = planned(tmp_path, "--topology", str(file))
    chosen = {row["size"]: row["chosen"] for row in document["winners"]}
    assert chosen[1000] in ("one-shot", "recursive-doubling")
    assert chosen[1_000_000_000] == "native"


PRESETS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in ("pcie-box", "four-cpu-hosts") else pytest.mark.soak)
    for path in sorted((ROOT / "clusters").glob("*.json"))  # tests/plan/test_by_size.py plans for the large ones
]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_planned_for(tmp_path: Path, preset: Path) -> None:
    document = planned(tmp_path, "--topology", str(preset), "--size", "160MB")
    assert document["chosen"] in STRATEGIES
    assert document["reason"]


def test_the_request_of_a_job_is_taken_or_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB % "chain")
    box, nodes = str(ROOT / "clusters/pcie-box.json"), str(ROOT / "clusters/four-cpu-hosts.json")
    assert planned(tmp_path, str(tmp_path / "job.yaml"), "--topology", box, "--size", "1MB")["chosen"] == "chain"
    (tmp_path / "job.yaml").write_text(JOB % "cpu")
    run = psctl(tmp_path, "plan", str(tmp_path / "job.yaml"), "--topology", nodes, "--size", "1MB", code=2)
    assert "several hosts" in run.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--topology", "clusters/pcie-box.json", "--world", "5"], "places for 4 ranks"),
        (["--topology", "clusters/pcie-box.json", "--cluster", "x.yaml"], "--topology"),
        (["--topology", "clusters/pcie-box.json", "--compute", "fast"], "--compute"),
        (["--topology", "clusters/pcie-box.json", "--compute", "last"], "--compute last: no job is given"),
        (["--topology", "clusters/pcie-box.json", "--explain", "rign"], 'did you mean "ring"'),
        (["--topology", "clusters/four-cpu-hosts.json", "--explain", "cpu"], "several hosts"),
        (["--topology", "no-such-file"], "no-such-file"),
        (["--topology", "LICENSE"], "not a known output"),
    ],
)
def test_what_can_not_be_planned_for_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    assert says in psctl(tmp_path, "plan", *words, code=2).stderr


def test_with_v_the_chosen_schedule_is_printed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB % "root")
    words = ["plan", str(tmp_path / "job.yaml"), "--topology", "clusters/pcie-box.json", "--size", "1MB"]
    run = psctl(tmp_path, "-v", *words)
    assert "step 0  rank 1 -> rank 0  add chunk 0" in run.stderr
    assert "step" not in psctl(tmp_path, *words).stderr


def test_the_memory_that_a_model_needs_on_its_servers(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(hosts(dict.fromkeys("abcd", 1.25e9)))
    document = planned(tmp_path, "--topology", str(file), "--parameters", "1e9")
    found = document["capacity"]
    assert document["size"] == 4 * 10**9
    assert (found["parameters"], found["servers"], found["hosts"], found["workers"]) == (10**9, 4, 4, 4)
    assert found["checkpoint"]["bytes"] == 12 * 10**9
    assert [row["consistency"] for row in found["waiting"]] == ["bsp", "ssp", "ssp", "ssp", "ssp", "ssp", "asp"]
    text = psctl(tmp_path, "plan", "--topology", str(file), "--parameters", "1e9").stdout
    assert "memory a server" in text
    psctl(tmp_path, "plan", "--topology", str(file), "--parameters", "1e9", "--size", "1MB", code=2)


def test_where_no_server_may_be_there_is_no_capacity(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(hosts({"a": 1e9, "b": 1e9}, {"a": ["worker"], "b": ["worker"]}))
    assert planned(tmp_path, "--topology", str(file), "--parameters", "1M")["capacity"] is None
