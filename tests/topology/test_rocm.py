"""AMD's tables: sections in any number and order, wide ones wrapped, of rocm-smi and of amd-smi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.rocm import read_cards, read_rocm
from psctl.topology.readings import GpuRow

CAPTURED = Path(__file__).parent.parent / "captured" / "rocm"
FILES = sorted(CAPTURED.glob("*.txt"))


def table(title: str, devices: list[str], word: str, self: str = "0") -> str:
    """Return a section as rocm-smi prints it, or amd-smi when the title ends with a colon."""
    label = 13 if title.endswith(":") else 7
    rows = [" " * label + "".join(f"{device:<13}" for device in devices)]
    for row in devices:
        rows.append(f"{row:<{label}}" + "".join(f"{self if row == column else word:<13}" for column in devices))
    head = title if title.endswith(":") else f" {title} ".center(90, "=")
    return "\n".join([head, *rows]) + "\n\n"


def wrapped(text: str, width: int = 120) -> str:
    """Return the text as a terminal of that width breaks it."""
    lines = [line[at : at + width] for line in text.split("\n") for at in range(0, max(len(line), 1), width)]
    return "\n".join(lines)


SIXTEEN = [f"GPU{index}" for index in range(16)]
TYPES = "Link Type between two GPUs"
BUSES = ["0000:0c:00.0", "0000:22:00.0", "0000:38:00.0"]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_outputs_of_real_machines_equal_what_was_read_by_hand(path: Path) -> None:
    found = read_rocm(path.read_text())
    facts = json.loads(path.with_suffix(".json").read_text())
    assert len(found.devices) == facts["gpu_count"]
    for pair, word in facts["links"].items():
        a, b = pair.split("-")
        assert found.types[a, b] == found.types[b, a] == word
    assert len(found.types) == facts["gpu_count"] * (facts["gpu_count"] - 1)
    assert found.findings == ()


def test_weights_hops_and_nodes() -> None:
    found = read_rocm((CAPTURED / "mi300a-x4-xgmi.txt").read_text())
    assert found.hops["GPU3", "GPU1"] == 1
    assert found.numa == {"GPU0": 0, "GPU1": 1, "GPU2": 2, "GPU3": 3}


def test_an_older_layout_names_gpus_without_brackets_and_may_have_no_node() -> None:
    nodes = "== Numa Nodes ==\nGPU 0    : (Topology) Numa Node: 1\nGPU 1    : (Topology) Numa Node: -1\n"
    found = read_rocm(nodes + table(TYPES, SIXTEEN[:2], "PCIE"))
    assert found.numa == {"GPU0": 1}
    assert found.types["GPU1", "GPU0"] == "PCIE"


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_sixteen_gpus_wrapped_by_the_terminal(width: int) -> None:
    text = table("Hops between two GPUs", SIXTEEN, "1") + table(TYPES, SIXTEEN, "XGMI")
    found = read_rocm(wrapped(text, width))
    assert found.devices == tuple(SIXTEEN)
    assert (len(found.types), set(found.types.values()), set(found.hops.values())) == (240, {"XGMI"}, {1})
    assert found.findings == ()


@pytest.mark.parametrize("ruler", ["=" * 26, "-" * 12, "", "**"])
def test_titles_with_any_ruler_or_none(ruler: str) -> None:
    found = read_rocm(table(TYPES, SIXTEEN[:2], "PCIE").replace("=", "").replace(TYPES, f"{ruler} {TYPES} {ruler}"))
    assert found.types == {("GPU0", "GPU1"): "PCIE", ("GPU1", "GPU0"): "PCIE"}


def test_amd_smi_names_its_rows_by_address() -> None:
    text = (
        table("ACCESS TABLE:", BUSES, "ENABLED", "ENABLED") + table("WEIGHT TABLE:", BUSES, "15")
        + table("LINK TYPE TABLE:", BUSES, "XGMI", "SELF") + table("NUMA BW TABLE:", BUSES, "50000-64000", "N/A")
        + table("DMA TABLE:", BUSES, "T", "SELF") + "Legend:\n  SELF = Current GPU\n"
    )  # fmt: skip
    found = read_rocm(text)
    assert found.devices == ("GPU0", "GPU1", "GPU2")
    assert found.buses == dict(zip(found.devices, BUSES, strict=True))
    assert found.types["GPU0", "GPU2"] == "XGMI"
    assert found.bandwidths["GPU0", "GPU1"] == 64e9
    assert found.findings == ()


def test_gpus_that_cannot_reach_each_other_are_a_finding() -> None:
    found = read_rocm(
        table(TYPES, SIXTEEN[:2], "PCIE") + table("Link accessibility between two GPUs", SIXTEEN[:2], "False", "True")
    )
    assert [finding.what for finding in found.findings] == ["GPU0 and GPU1 cannot reach each other's memory directly"]


def test_what_is_missing_is_reported() -> None:
    whole = table(TYPES, SIXTEEN[:3], "XGMI")
    cut = read_rocm(whole[: whole.rindex("GPU2")])
    assert [finding.what for finding in cut.findings] == ["the table of link types lacks the row of GPU2"]
    assert cut.types["GPU0", "GPU2"] == "XGMI"
    short = read_rocm(whole.rstrip().removesuffix("0").rstrip().removesuffix("XGMI"))
    assert [finding.what for finding in short.findings] == [
        "the table of link types is cut or mangled in the row of GPU2"
    ]
    no_types = read_rocm(table("Hops between two GPUs", SIXTEEN[:2], "1"))
    assert "no table of link types" in no_types.findings[0].what


def test_nodes_without_their_title_and_without_tables() -> None:
    found = read_rocm("GPU[0]\t\t: (Topology) Numa Node: 3\nGPU[1]\t\t: (Topology) Numa Node: 2\n")
    assert (found.devices, found.numa) == (("GPU0", "GPU1"), {"GPU0": 3, "GPU1": 2})


def test_one_gpu_alone_has_no_links_and_nothing_amiss() -> None:
    found = read_rocm(table(TYPES, ["GPU0"], "XGMI"))
    assert (found.devices, found.types, found.findings) == (("GPU0",), {}, ())


def test_names_addresses_and_memory_of_cards() -> None:
    text = (
        "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X OAM\nGPU[0]\t\t: Card Model: \t\t0x74a1\n"
        "GPU[1]\t\t: Card series: \t\tAMD Instinct MI300X OAM\nGPU[1]\t\t: PCI Bus: 0000:26:00.0\n"
        "GPU[0]\t\t: PCI Bus: 0000:0C:00.0\nGPU[0]\t\t: VRAM Total Memory (B): 206141652992\n"
    )
    assert read_cards(text).gpus == (
        GpuRow(0, "AMD Instinct MI300X OAM", memory=206141652992, bus="0000:0c:00.0"),
        GpuRow(1, "AMD Instinct MI300X OAM", bus="0000:26:00.0"),
    )


MI300A = (CAPTURED / "mi300a-x4-xgmi.txt").read_text()


@given(st.integers(0, len(MI300A)), st.text("GPU0123 XMI=[]:\n\t", max_size=12), st.integers(0, 200))
def test_no_garbling_is_an_error_or_a_link_to_nobody(at: int, put: str, lost: int) -> None:
    found = read_rocm(MI300A[:at] + put + MI300A[at + lost :])
    assert {name for pair in found.types for name in pair} <= set(found.devices)
    read_cards(MI300A[:at] + put)
