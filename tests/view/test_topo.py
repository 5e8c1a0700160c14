"""topo in a terminal and in a pipe: what is drawn, that nothing is cut, that nothing foreign does harm."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.text import Text

from psctl.view.console import make_console
from psctl.view.device_tree import device_tree, fold_alike_hosts
from psctl.view.topo import draw_topo
from psctl.view.topo_rows import HEADS
from tests.view.machines import (
    HOSTILE,
    TWO_RINGS,
    accelerated,
    alone,
    cube_mesh,
    device,
    far_apart,
    hostile,
    link,
    one_switch,
    plain,
    racks,
    slot,
    switched,
    three_hosts,
    uplink,
)


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(document, width=100, matrix=False, **environment):
    stream = Screen()
    console = make_console(stream, environment={"TERM": "xterm-256color", **environment})
    console.size = (width, 40)
    draw_topo(console, document, matrix)
    return stream.getvalue()


def lines(document, width=100, matrix=False):
    return Text.from_ansi(shown(document, width, matrix)).plain.splitlines()


def rows(document, matrix=False):
    stream = io.StringIO()
    draw_topo(make_console(stream, environment={}), document, matrix)
    return [line.split("\t") for line in stream.getvalue().splitlines()]


def line_of(found, begins):
    return next(line for line in found if line.lstrip("│├└─ ").startswith(begins))


def test_the_tree_shows_what_hangs_on_what_and_how_wide_it_is():
    found = lines(alone(cube_mesh()))
    tree = [re.match(r"([│├└─ ]*)(\S+)", line) for line in found[1:19]]
    depths = {match[2]: len(match[1]) for match in tree}
    assert [match[2] for match in tree][:6] == ["CPU0", "SW0", "GPU0", "GPU1", "mlx5_0", "SW1"]
    assert (depths["CPU1"], depths["SW3"], depths["GPU7"], depths["mlx5_3"]) == (3, 6, 9, 9)
    assert re.search(r"GPU0 +PCIe 16 GB/s +Tesla V100-SXM2-16GB · 16 GiB$", found[3])
    assert "port 95.6 Gbit/s" in line_of(found, "mlx5_0")
    assert line_of(found, "SW0").endswith("derived")
    assert any(line.startswith("derived: ") for line in found)


def test_cables_are_printed_in_as_few_lines_as_possible():
    assert "NVLink  GPU0-GPU7 on NVSW0 (NVSwitch): each 300 GB/s, derived" in lines(alone(switched(8, 4)))
    assert "xGMI  GPU0-GPU3, every pair: 64 GB/s" in lines(alone(accelerated()))
    mesh = lines(alone(cube_mesh()), 120)
    assert "NVLink  GPU0 = GPU3, GPU4 (NV2 50 GB/s) - GPU1, GPU2 (NV1 25 GB/s)" in mesh
    assert "SMP  CPU0 = CPU1: 19.2 GB/s, derived" in mesh
    devices = [device(f"GPU{i}", "gpu") for i in range(4)]
    bridges = [link("GPU0", "GPU1", "NV4", 1e11, switched=False), link("GPU2", "GPU3", "NV4", 1e11, switched=False)]
    found = lines(alone({"name": "x", "devices": devices, "links": bridges}))
    assert "NVLink  GPU0 = GPU1, GPU2 = GPU3: NV4 100 GB/s" in found


def test_measured_rates_are_marked():
    host = one_switch()
    host["links"] = [
        each | ({"measured": True, "bandwidth": 13e9} if each["type"] == "PIX" else {}) for each in host["links"]
    ]
    assert "copies, measured  GPU0-GPU3, every pair: 13 GB/s" in lines(alone(host))
    host["links"][0] = slot("GPU0", "SW0", 12.5e9, measured=True)
    assert line_of(lines(alone(host)), "GPU0").endswith("PCIe 12.5 GB/s  measured")
    assert ["saved", "copy", "GPU0", "GPU1", "PIX", "13 GB/s", "measured", "-"] in rows(alone(host))


def test_a_finding_stands_with_its_cure():
    found = lines(alone(cube_mesh()))
    at = found.index("▲ GPU3 runs at PCIe x4 of x16: a quarter of its bandwidth")
    assert found[at + 1] == "  → reseat the card; look at the riser"


def test_rings_are_drawn_closed_with_their_shares():
    found = lines(alone(cube_mesh(), TWO_RINGS), 130)
    assert any(line.startswith("suggestion  multi-ring  2 link-disjoint rings") for line in found)
    assert "   67%  GPU0 → GPU3 → GPU2 → GPU1 → GPU5 → GPU6 → GPU7 → GPU4 → GPU0" in found
    chain = {"name": "chain", "reason": "", "groups": [["a", "b", "c"]]}
    assert "    -   a → b → c" in lines(alone(cube_mesh(), chain))
    sets = {"name": "hierarchical", "reason": "", "groups": [["h1", "h2", "h3", "x"]]}
    assert "    -   h1-h3, x" in lines(alone(cube_mesh(), sets))


def test_what_lies_between_hosts():
    found = lines(three_hosts())
    assert "node-a ── network  93.6 Mbit/s  100 us  Ethernet  via eth0  measured" in found
    assert "▲ node-d: refused" in found
    assert "  → is sshd there?" in found
    unknown = {
        "hosts": [plain("a"), plain("b")],
        "between": [uplink("a", "network", None), uplink("b", "network", None)],
    }
    assert any(re.match(r"a, b ── network  rate not known +100 us +Ethernet +nominal", line) for line in lines(unknown))


def test_hosts_that_are_alike_are_drawn_once_and_the_others_alone():
    document = racks()
    found = lines(document)
    assert sum("CPU0" in line for line in found) == 2  # a rack each: labels differ
    assert "node01-node08 ── r1  9.56 Gbit/s  100 us  Ethernet  via eth0  nominal" in found
    assert "r1            ── r2  38.2 Gbit/s  100 us  Ethernet            measured" in found
    document["hosts"][3]["problems"] = [{"what": "x", "cure": "y"}]
    assert [host["name"] for host in fold_alike_hosts(document["hosts"])] == [
        "node01-node03, node05-node08 (7 hosts alike)", "node04", "node09-node16 (8 hosts alike)",
    ]  # fmt: skip
    assert sum(row[1] == "host" for row in rows(document)) == 16


def test_a_device_that_nothing_reaches_is_still_drawn():
    devices = [
        device("CPU0", "cpu", 0),
        device("GPU0", "gpu", 0),
        device("eth0", "nic", None),
        device("SW0", "switch", 3),
    ]
    arranged = device_tree({"devices": devices, "links": [slot("GPU9", "SW0")]})
    assert {branch.id: [b.id for b in branch.below] for branch in arranged.roots} == {
        "CPU0": ["GPU0"],
        "SW0": [],
        "eth0": [],
    }


def test_slots_in_a_circle_end():
    devices = [device(f"SW{i}", "switch") for i in range(3)]
    links = [slot("SW0", "SW1"), slot("SW1", "SW2"), slot("SW2", "SW0")]
    assert sorted(branch.id for branch in device_tree({"devices": devices, "links": links}).nodes()) == [
        "SW0",
        "SW1",
        "SW2",
    ]


def test_the_matrix_has_every_word_once_a_pair_and_unknown_ones_as_they_stand():
    host = one_switch()
    host["links"] = [each for each in host["links"] if each["type"] != "PIX"] + [link("GPU0", "GPU1", "QPX")]
    found = lines(alone(host), 80, matrix=True)
    assert [line.split() for line in found[1:4]] == [
        ["GPU0", "GPU1", "NUMA"],
        ["GPU0", "X", "QPX", "0"],
        ["GPU1", "QPX", "X", "0"],
    ]
    assert any(re.match(r"QPX +as printed by the tool; meaning unknown", line) for line in found)
    assert rows(alone(host), matrix=True)[1:3] == [["", "GPU0", "GPU1", "NUMA"], ["GPU0", "X", "QPX", "0"]]
    assert "no matrix" in "".join(lines(alone(plain("a")), matrix=True))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_wide_matrix_is_split_and_nothing_is_cut(width):
    found = lines(alone(switched(8, 17)), width, matrix=True)
    assert max(map(cell_len, found)) <= width
    heads = [line.split() for line in found if re.match(r" +(GPU|NIC|NUMA)", line)]
    assert [word for head in heads for word in head] == [
        *(f"GPU{i}" for i in range(8)),
        *(f"NIC{i}" for i in range(17)),
        "NUMA",
    ]
    cells = [word for line in found if line.startswith("GPU3 ") for word in line.split()[1:]]
    assert cells == ["NV12"] * 3 + ["X"] + ["NV12"] * 4 + ["SYS"] * 17 + ["0"]


EVERY = {
    "mesh": alone(cube_mesh(), TWO_RINGS), "switched": alone(switched(16, 10)), "switch": alone(one_switch()),
    "every pair": alone(accelerated()), "far": alone(far_apart()), "three": three_hosts(), "racks": racks(),
    "hostile": hostile(), "nothing": {"hosts": [], "between": [], "strategy": None},
    "bare": {"hosts": [{"name": "a", "devices": [], "links": []}]},
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_every_device_is_there(name, width):
    document = EVERY[name]
    found = lines(document, width)
    assert max(map(cell_len, found), default=0) <= width
    squeezed = re.sub(r"[^A-Za-z0-9_]", "", "".join(found))
    if name != "hostile":
        kept = document if name != "racks" else {"hosts": []}
        assert all(each["id"] in squeezed for host in kept["hosts"] for each in host["devices"])


def test_nothing_foreign_reaches_the_terminal_or_breaks_a_row():
    said = shown(hostile(), 300, NO_COLOR="1")
    assert not set(said) & {"\x1b", "\x00", "\u202e"} - {"\x1b"} and "\x1b[31m" not in said
    assert {len(row) for row in rows(hostile())} == {len(HEADS)}
    assert HOSTILE not in "".join("".join(row) for row in rows(hostile()))


def test_colours_go_by_what_a_thing_is_and_go_off():
    assert "\x1b[" in shown(alone(one_switch()))
    bare = shown(alone(cube_mesh(), TWO_RINGS), NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", bare)


def test_an_encoding_without_lines_gets_plain_ones():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream.isatty = lambda: True
    console = make_console(stream, environment={"TERM": "xterm"})
    console.size = (100, 40)
    draw_topo(console, alone(cube_mesh(), TWO_RINGS))
    stream.flush()
    text = Text.from_ansi(stream.buffer.getvalue().decode("ascii")).plain
    assert "|- CPU0" in text and "?" not in text
    assert "GPU0 > GPU3" in text


def test_rows_in_a_pipe_show_the_parent_of_each_device():
    found = rows(alone(cube_mesh(), TWO_RINGS))
    assert tuple(found[0]) == HEADS
    assert {len(row) for row in found} == {len(HEADS)}
    assert ["dgx", "gpu", "GPU3", "SW1", "PCIe", "16 GB/s", "derived", "Tesla V100-SXM2-16GB, 16 GiB"] in found
    assert ["dgx", "link", "GPU0", "GPU3", "NV2", "50 GB/s", "nominal", "-"] in found
    assert ["-", "strategy", "multi-ring", "-", "-", "-", "-", TWO_RINGS["reason"]] in found
    assert found[-1][5:] == ["0.3333", "-", " -> ".join(TWO_RINGS["groups"][1])]
    failed = rows(three_hosts())
    assert ["node-d", "error", "-", "-", "-", "-", "-", "node-d: refused -> is sshd there?"] in failed
    assert ["node-c", "between", "-", "network", "Ethernet", "468 Mbit/s", "measured", "100 us via eth0"] in failed
