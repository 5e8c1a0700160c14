"""The picture: well formed, nothing over anything else, everything that is known in it, nothing foreign obeyed."""

from __future__ import annotations

import functools
import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from psctl.view.drawing_styles import RING_COLOURS
from psctl.view.pictures.canvas import Area, fold_text, text_width
from psctl.view.pictures.svg import svg
from tests.view.machines import (
    TWO_RINGS,
    accelerated,
    alone,
    cube_mesh,
    far_apart,
    hostile,
    one_switch,
    plain,
    racks,
    switched,
    three_hosts,
    uplink,
)

SVG = "{http://www.w3.org/2000/svg}"
PAIRS = [uplink(a, b, 1e9 * (i + 1), True) for i, (a, b) in enumerate(itertools.combinations("abcd", 2))]
EVERY = {
    "mesh": alone(cube_mesh(), TWO_RINGS), "17 nics": alone(switched(8, 17)), "16 gpus": alone(switched(16, 10)),
    "one switch": alone(one_switch()), "every pair": alone(accelerated()), "far": alone(far_apart()),
    "three": three_hosts(), "racks": racks(), "racks of meshes": racks(16, gpus=True), "hostile": hostile(),
    "nothing": {"hosts": [], "between": [], "strategy": None}, "bare": {"hosts": [{"name": "a", "devices": []}]},
    "pairs": {"hosts": [plain(name) for name in "abcd"], "between": PAIRS, "strategy": None},
}  # fmt: skip


def drawn(document):
    return ET.fromstring(svg(document).encode())


@functools.cache
def picture(name):
    """The picture of one of EVERY, drawn once for all who look at it."""
    return drawn(EVERY[name])


def meeting(areas):
    """Index pairs of areas that meet; only those are compared that share a part of the page's width."""
    order = sorted(range(len(areas)), key=lambda index: areas[index].x)
    for place, first in enumerate(order):
        right = areas[first].x + areas[first].width
        for second in itertools.takewhile(lambda index, right=right: areas[index].x <= right, order[place + 1 :]):
            if areas[first].meets(areas[second]):
                yield first, second


def boxes(root, kind="box"):
    for each in root.iter(f"{SVG}rect"):
        if each.get("class") == kind:
            yield Area(*(float(each.get(key)) for key in ("x", "y", "width", "height")))


def texts(root):
    """Every text with what it covers at most."""
    for each in root.iter(f"{SVG}text"):
        size, words = float(each.get("font-size")), each.text or ""
        width = text_width(words, size, each.get("font-weight") == "bold")
        left = float(each.get("x")) - (width / 2 if each.get("text-anchor") == "middle" else 0)
        yield words, Area(left, float(each.get("y")) - size * 0.8, width, size * 1.05)


def within(inner, outer):
    return (
        outer.x <= inner.x + 0.1 and inner.x + inner.width <= outer.x + outer.width + 0.1
        and outer.y <= inner.y + 0.1 and inner.y + inner.height <= outer.y + outer.height + 0.1
    )  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_no_box_and_no_text_lies_over_another_and_all_are_on_the_page(name):
    root = picture(name)
    page = Area(0, 0, float(root.get("width")), float(root.get("height")))
    placed, words = list(boxes(root)), list(texts(root))
    assert not [(placed[a], placed[b]) for a, b in meeting(placed)]
    assert not [(words[a][0], words[b][0]) for a, b in meeting([area for _, area in words])]
    astray = [text for text, area in words if any(area.meets(box) and not within(area, box) for box in placed)]
    assert not astray, "these lie across the edge of a box"
    assert all(within(area, page) for area in [*placed, *(area for _, area in words)])


@pytest.mark.parametrize("name", EVERY)
def test_every_host_and_device_has_its_name_in_it(name):
    document = EVERY[name]
    words = [text for text, _ in texts(picture(name))]
    if name != "hostile":
        assert {host["name"] for host in document["hosts"]} <= set(words)
        wanted = sorted(each["id"] for host in document["hosts"] for each in host.get("devices", []))
        known = set(wanted)
        assert wanted == sorted(text.split(" · ")[0] for text in words if text.split(" · ")[0] in known)


def test_hosts_do_not_lie_over_each_other():
    for name in ("three", "racks", "pairs"):
        panels = [area for area in boxes(picture(name), "ground") if area.width >= 300]
        assert len(panels) == len(EVERY[name]["hosts"])
        assert not [pair for pair in itertools.combinations(panels, 2) if pair[0].meets(pair[1])]


def paths(root):
    for each in root.iter(f"{SVG}path"):
        title = each.find(f"{SVG}title")
        yield (title.text if title is not None else ""), each


def test_the_wider_a_cable_the_thicker_its_line():
    width = {title: float(path.get("stroke-width")) for title, path in paths(drawn(alone(cube_mesh())))}
    single, double = "GPU0 - GPU1: NV1 25 GB/s, nominal", "GPU0 - GPU3: NV2 50 GB/s, nominal"
    assert width["GPU0 - SW0: PCIe 16 GB/s, derived"] < width[single] < width[double]
    assert len({value for title, value in width.items() if "NV2" in title}) == 1


def test_rings_have_their_colours_and_shares():
    root = drawn(alone(cube_mesh(), TWO_RINGS))
    colours = [path.get("stroke") for title, path in paths(root) if "NV2" in title]
    assert colours == [RING_COLOURS[0]] * 8
    assert {path.get("stroke") for title, path in paths(root) if "NV1" in title} == {RING_COLOURS[1]}
    words = [text for text, _ in texts(root)]
    assert {"67%", "33%", "Suggested: multi-ring"} <= set(words)
    assert "GPU0 → GPU3 → GPU2 → GPU1 → GPU5 → GPU6 → GPU7 → GPU4 → GPU0" in words


def test_a_ring_through_a_switch_is_dashed():
    ring = {"name": "ring", "reason": "one switch", "groups": [["GPU0", "GPU1", "GPU2", "GPU3"]], "shares": [1.0]}
    root = drawn(alone(one_switch(), ring))
    dashed = [path for title, path in paths(root) if title == "ring 1, through a switch"]
    assert len(dashed) == 4
    assert all(path.get("stroke-dasharray") and path.get("stroke") == RING_COLOURS[0] for path in dashed)


def test_derived_links_are_dashed_and_labelled():
    root = drawn(alone(switched(8, 4)))
    assert all(path.get("stroke-dasharray") for title, path in paths(root) if title.endswith("derived"))
    assert any(text.startswith("derived: ") for text, _ in texts(root))
    assert not any(text.startswith("derived: ") for text, _ in texts(drawn(three_hosts())))


def test_findings_are_printed_and_marked_on_their_devices():
    root = drawn(alone(cube_mesh()))
    words = [text for text, _ in texts(root)]
    assert "GPU3 runs at PCIe x4 of x16: a quarter of its bandwidth → reseat the card; look at the riser" in words
    badges = list(root.iter(f"{SVG}circle"))
    assert len(badges) == 1 + 2 + 2  # how many there are; each finding; each device
    many = cube_mesh()
    many["problems"] = [{"what": "GPU0, GPU1 and GPU2 are too hot", "cure": ""}]
    assert len(list(drawn(alone(many)).iter(f"{SVG}circle"))) == 1 + 1


def test_cables_between_hosts_are_followed_from_end_to_end():
    root = drawn(three_hosts())
    titles = {title for title, _ in paths(root)}
    assert "node-a - network: Ethernet, 93.6 Mbit/s, 100 us, measured" in titles
    assert "to network · via eth0 · 93.6 Mbit/s · 100 us · measured" in [text for text, _ in texts(root)]
    assert sum(" - " in title and "Ethernet" in title for title, _ in paths(picture("pairs"))) == 6


def test_nothing_foreign_is_obeyed():
    text = svg(hostile())
    root = ET.fromstring(text.encode())
    assert not list(root.iter(f"{SVG}script")) and text.count("</svg>") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
    assert "<script>" in "".join(word for word, _ in texts(root))


def test_long_texts_are_folded_and_nothing_is_lost():
    words = "a " * 40 + "x" * 200
    parts = fold_text(words, 100, 10)
    assert "".join(parts).replace(" ", "") == words.replace(" ", "")
    assert all(text_width(part, 10) <= 100 for part in parts)
    assert fold_text("", 100, 10) == [""]
