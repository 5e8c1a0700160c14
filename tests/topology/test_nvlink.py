"""`nvidia-smi nvlink -s` lists the links of each GPU; values that it lacks are reported and never made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.nvlink import read_nvlink

CAPTURED = Path(__file__).parent.parent / "captured" / "nvlink-s"
RATES = {"a6000x8-4links": 14.062e9, "h100-one-gpu-18links": 26.562e9, "ndv2-v100x7-some-inactive": 25.781e9}
LISTED = {
    "a10-empty-output": [],
    "a100-gpu6-all-inactive": [6],
    "a6000x8-4links": list(range(8)),
    "h100-one-gpu-18links": [0],
    "h800x8-8links-elided": [0, 1, 7],
    "ndv2-v100x7-some-inactive": list(range(7)),
    "rtx3090x2-4links-tabs": [0, 1],
    "v100-ndv2-gpu3-snippet": [3],
    "v100x4-ppc64le-6links": [0, 1, 2, 3],
}
SAID = {
    "a100-gpu6-all-inactive": "no NVLink of GPU6 is up",
    "h800x8-8links-elided": "the NVLinks of GPU2, GPU3, GPU4, GPU5, GPU6 are not in the output",
}


def test_all_captured_outputs_are_checked() -> None:
    assert sorted(path.stem for path in CAPTURED.glob("*.txt")) == sorted(LISTED)


@pytest.mark.parametrize("name", LISTED)
def test_captured_outputs_equal_what_was_checked_by_hand(name: str) -> None:
    status = read_nvlink((CAPTURED / f"{name}.txt").read_bytes().decode())
    facts = json.loads((CAPTURED / f"{name}.json").read_text())
    assert [gpu.index for gpu in status.gpus] == LISTED[name]
    for gpu in status.gpus:
        assert len(gpu.links) == facts.get("links_per_gpu", len(gpu.links))
        up = sum(link is not None for link in gpu.links)
        assert up == facts.get("links_active", {}).get(f"GPU{gpu.index}", up)
        assert {link for link in gpu.links if link} <= {RATES.get(name, link) for link in gpu.links}
    assert [finding.what for finding in status.findings] == ([SAID[name]] if name in SAID else [])


def test_a_link_that_is_down_keeps_its_place() -> None:
    status = read_nvlink((CAPTURED / "v100-ndv2-gpu3-snippet.txt").read_text())
    rate = 25.781e9
    assert status.gpus[0].links == (rate, rate, rate, None, rate, None)
    assert (status.gpus[0].name, status.gpus[0].uuid) == ("Tesla V100-SXM2-32GB", "")


HEAD = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n"


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        ("\t Link 0: 26.562 GB/s", 26.562e9), ("Link 0: 50 GB/s", 50e9), ("   Link 0: 25781 MB/s", 25.781e9),
        ("Link 0:  <inactive>", None), ("Link 0: inActive", None),
    ],
)  # fmt: skip
def test_rates_are_bytes_per_second(line: str, rate: float | None) -> None:
    assert read_nvlink(HEAD + line + "\r\n").gpus[0].links == (rate,)


def test_an_unknown_state_is_reported_and_is_no_link() -> None:
    status = read_nvlink(HEAD + "Link 0: 26.562 GB/s\nLink 1: asleep\nLink 2: 26.562 GB/s\n")
    assert status.gpus[0].links == (26.562e9, 26.562e9)
    assert [finding.what for finding in status.findings] == ["the output does not show the rate of GPU0's NVLink 1"]


def test_gpus_without_nvlink_and_with_all_links_down_differ() -> None:
    status = read_nvlink(
        "GPU 0: NVIDIA T1000 (UUID: GPU-a)\nNVML: Device does not have or support Nvlink\n"
        "GPU 1: Quadro RTX 5000 (UUID: GPU-b) NVML: Unable to retrieve Nvlink information as all links are inActive\n"
    )
    assert [(gpu.name, gpu.uuid, gpu.links) for gpu in status.gpus] == [
        ("NVIDIA T1000", "GPU-a", ()), ("Quadro RTX 5000", "GPU-b", ()),
    ]  # fmt: skip
    assert status.findings == ()


DARK = "GPU 1: {} (UUID: GPU-b)\n NVML: Unable to retrieve NVLink information as all links are inActive\n"


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GB200"])
def test_gpus_on_a_board_of_nvlinks_without_a_link_up_are_reported(name: str) -> None:
    assert [finding.what for finding in read_nvlink(DARK.format(name)).findings] == ["no NVLink of GPU1 is up"]


@pytest.mark.parametrize("name", ["NVIDIA A100 80GB PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA RTX A6000"])
def test_a_card_without_a_bridge_is_no_finding_unless_an_identical_one_has_links(name: str) -> None:
    assert read_nvlink(DARK.format(name)).findings == ()
    twin = f"GPU 0: {name} (UUID: GPU-a)\n Link 0: 14.062 GB/s\n"
    said = [finding.what for finding in read_nvlink(twin + DARK.format(name)).findings]
    assert said == ["no NVLink of GPU1 is up, but on GPU0 of the same model some are"]


@st.composite
def machines(draw: st.DrawFn) -> tuple[str, list[tuple[float | None, ...]]]:
    """Machines of 1 to 16 GPUs with 1 to 18 links each, and their outputs in any indentation."""
    count, links = draw(st.integers(1, 16)), draw(st.integers(1, 18))
    state = st.sampled_from([14.062e9, 25.781e9, 26.562e9, 50e9, None])
    truth = [tuple(draw(state) for _ in range(links)) for _ in range(count)]
    indent = draw(st.sampled_from(["\t ", "         ", "", "\u00a0 "]))
    lines = []
    for index, gpu in enumerate(truth):
        lines.append(f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index})")
        for number, rate in enumerate(gpu):
            lines.append(f"{indent}Link {number}: " + ("<inactive>" if rate is None else f"{rate / 1e9:g} GB/s"))
    return "\n".join(lines) + "\n", truth


@given(machines(), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "$ nvidia-smi nvlink -s\n", "[n1] "]))
def test_any_style_says_the_same(machine: tuple[str, list[tuple[float | None, ...]]], end: str, before: str) -> None:
    text, truth = machine
    status = read_nvlink(before + text.replace("\n", end) + "$ ")
    assert [gpu.links for gpu in status.gpus] == truth
    assert status.findings == ()


@given(machines(), st.integers(0))
def test_a_cut_text_never_says_what_the_whole_did_not(
    machine: tuple[str, list[tuple[float | None, ...]]], cut: int
) -> None:
    text, truth = machine
    kept = text[: cut % len(text)]
    status = read_nvlink(kept)
    for gpu in status.gpus:
        assert gpu.index in range(len(truth))
        assert gpu.links == truth[gpu.index][: len(gpu.links)]
    short = [gpu for gpu in status.gpus if len(gpu.links) < len(truth[0])]
    if short and len(status.gpus) > 1:
        assert status.findings


@given(st.text(alphabet="GPU 0123:Link<inactive>.GB/s\n()", max_size=200))
def test_nothing_raises(text: str) -> None:
    read_nvlink(text)
