"""A plan for very many ranks: nothing of it grows with the pairs of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.inside import psctl

PRESET = Path(__file__).parents[2] / "clusters" / "sixteen-gpu-nodes.json"
NODES = 64


def test_512_gpus_are_planned_and_no_tree_is_packed(tmp_path: Path) -> None:
    document = json.loads(PRESET.read_text())
    host, cable = json.dumps(document["hosts"][0]), document["between"][0]
    document["hosts"] = [json.loads(host.replace("node0", f"node{n}")) for n in range(NODES)]
    document["between"] = [{**cable, "a": f"node{n}"} for n in range(NODES)]
    (tmp_path / "many.json").write_text(json.dumps(document))
    done = psctl(tmp_path, "plan", "--topology", "many.json", "--size", "160MB", "-o", "json")
    plan = json.loads(done.stdout)
    assert plan["world"] == 8 * NODES
    trees = next(one for one in plan["candidates"] if one["strategy"] == "packed-trees")
    assert (trees["feasible"], trees["why_not"]) == (False, "more than 256 ranks: trees are not packed")
    assert plan["chosen"] == "hierarchical"
    rows = {one["strategy"]: one["seconds"] for one in plan["candidates"]}
    bound = 2 * 63 / 64 * 160e6 / 11.95e9
    assert bound <= rows["hierarchical"] <= 1.5 * bound
