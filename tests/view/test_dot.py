"""The text for graphviz: nodes, edges, clusters, rings; anything as a name."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from psctl.view.drawing_styles import RING_COLOURS
from psctl.view.pictures.dot import dot, quoted
from tests.view.machines import HOSTILE, TWO_RINGS, alone, cube_mesh, hostile, one_switch, racks, switched, three_hosts

EDGE = re.compile(r'^ +"((?:[^"\\]|\\.)*)" -- "((?:[^"\\]|\\.)*)" \[(.*)\]$', re.MULTILINE)


def edges(document):
    return {(a, b): dict(re.findall(r'(\w+)="?([^",]+)"?', more)) for a, b, more in EDGE.findall(dot(document))}


def test_cables_are_edges_and_relations_are_none():
    found = edges(alone(cube_mesh()))
    assert ("dgx/GPU0", "dgx/GPU3") in found
    assert ("dgx/GPU0", "dgx/GPU5") not in found  # SYS
    assert found["dgx/SW0", "dgx/GPU0"]["style"] == "dashed"
    assert float(found["dgx/GPU0", "dgx/GPU1"]["penwidth"]) < float(found["dgx/GPU0", "dgx/GPU3"]["penwidth"])
    assert len([pair for pair in edges(alone(switched(8, 4))) if "NVSW0" in pair[1]]) == 8


def test_rings_colour_the_cables_they_use_and_are_arrows_where_they_use_none():
    found = edges(alone(cube_mesh(), TWO_RINGS))
    assert found["dgx/GPU0", "dgx/GPU3"]["color"] == RING_COLOURS[0]
    assert found["dgx/GPU0", "dgx/GPU1"]["color"] == RING_COLOURS[1]
    ring = {"name": "ring", "reason": "", "groups": [["GPU0", "GPU1", "GPU2"]]}
    found = edges(alone(one_switch(), ring))
    assert found["saved/GPU2", "saved/GPU0"]["dir"] == "forward"


def test_hosts_hang_on_their_network():
    found = edges(three_hosts())
    assert found["/network", "node-a/eth0"]["label"] == "Ethernet 93.6 Mbit/s 100 us measured"
    assert edges(racks())["/r1", "/r2"]["penwidth"] == "7.0"


def test_any_name_is_a_harmless_string():
    assert quoted('a"b\\c\nd\x1b[31m') == '"a\\"b\\\\c d"'
    text = dot(hostile())
    assert HOSTILE not in text and "\x1b" not in text
    assert not re.sub(r'"(?:[^"\\]|\\.)*"', "", text).count('"')


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
@pytest.mark.parametrize("document", [alone(cube_mesh(), TWO_RINGS), three_hosts(), racks(), hostile(), {"hosts": []}])
def test_graphviz_reads_it(document):
    done = subprocess.run(["dot", "-Tcanon"], input=dot(document).encode(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
