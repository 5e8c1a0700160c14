"""`nvidia-smi topo -m` is read in every shape that it comes in, and nothing is ever read that is not there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psctl.topology.readers.matrix import read_matrix
from psctl.topology.readings import Affinity, Matrix
from tests.hypothesis_profile import examples
from tests.topology.matrices import AFTER, BEFORE, LEGEND, Truth, squeezed, truths, wrapped

CAPTURED = Path(__file__).parent.parent / "captured" / "topo-m"
FILES = sorted(path.stem for path in CAPTURED.glob("*.txt"))


def read(name: str) -> tuple[Matrix, dict]:
    facts = json.loads((CAPTURED / f"{name}.json").read_text())
    return read_matrix((CAPTURED / f"{name}.txt").read_bytes().decode()), facts


PARTS = {
    "dgx-h100-talos-cut-after-nic5": "no row for NIC6, NIC7, NIC8, NIC9, NIC10, NIC11",
    "gb10-4nics-capped": "no row for NIC0, NIC1, NIC2, NIC3",
}


@pytest.mark.parametrize("name", FILES)
def test_captured_matrices_equal_what_was_checked_by_hand(name: str) -> None:
    matrix, facts = read(name)
    said = {pair: matrix.words[a, b] for pair in facts["pairs"] for a, b in [tuple(pair.split("-"))]}
    assert said == facts["pairs"]
    gpus = [device for device in matrix.devices if device.startswith("GPU")]
    assert (len(gpus), len(matrix.devices) - len(gpus)) == (facts["gpu_count"], facts["nic_count"])
    assert any(affinity.numa for affinity in matrix.affinity.values()) == facts["numa_affinity_columns"]
    assert len(matrix.legend) in (0, facts["nic_count"])
    if part := PARTS.get(name):
        assert [part in finding.what for finding in matrix.findings] == [True]
    else:
        assert not matrix.findings
        assert len(matrix.words) == len(matrix.devices) * (len(matrix.devices) - 1)


def test_there_are_captured_matrices() -> None:
    assert len(FILES) == 41


AFFINITIES = {
    "a800x8-nv8-2nics-glued-affinity": ("GPU3", Affinity("0-31,64-95", "0", "N/A")),
    "pcie8-sys-8numa": ("GPU4", Affinity("112-127,240-254", "7", "N/A")),
    "a100pcie-x4-nvlink-pairs-azure-nc96-old": ("GPU3", Affinity("72-95", "3")),
    "azure-nv12-m60x2-soc": ("GPU1", Affinity("0-11")),
    "dgx1p-p100x8-soc-gluedheader": ("GPU7", Affinity("1-1")),
    "v100x8-ddpbench-node": ("GPU0", Affinity("0-19,40-59")),
    "v100x8-sxm2-reordered-doubletabs-dlperf": ("GPU7", Affinity("24-47,72-95", "1")),
}


@pytest.mark.parametrize("name", AFFINITIES)
def test_affinity_stands_under_its_title(name: str) -> None:
    gpu, affinity = AFFINITIES[name]
    assert read(name)[0].affinity[gpu] == affinity


def test_nics_have_the_names_of_the_legend() -> None:
    matrix, _ = read("nv18x8-9nics-ansi-no-esc")
    assert matrix.legend["NIC0"] == "mlx5_10" and matrix.legend["NIC8"] == "mlx5_bond_0"


def check(truth: Truth, text: str) -> None:
    matrix = read_matrix(text)
    assert list(matrix.devices) == truth.devices
    assert matrix.words == truth.words
    for gpu, values in truth.tails.items():
        named = dict(zip(truth.titles, values, strict=True))
        assert matrix.affinity[gpu] == Affinity(**named)
    assert matrix.findings == ()


@given(truths(), st.booleans(), st.integers(0, 2), st.sampled_from(["\n", "\r\n", "\n\n"]), BEFORE, AFTER)
def test_tabs_escapes_line_ends_and_noise_change_nothing(
    truth: Truth, header_tab: bool, ansi: int, end: str, before: str, after: str
) -> None:
    check(truth, before + end.join(truth.lines(header_tab, ansi)) + end + LEGEND.replace("\n", end) + after)


@given(truths(known=True), st.integers(40, 260), st.booleans(), BEFORE)
def test_a_terminal_may_break_lines_anywhere(truth: Truth, width: int, trim: bool, before: str) -> None:
    check(truth, before + "\n".join(wrapped(truth.lines(), width, trim)) + "\n" + LEGEND)


HALVES = {
    "bnxt_re and 0": (71, [f"GPU{at}" for at in range(5)] + ["bnxt_re3", "bnxt_re0", "bnxt_re2", "bnxt_re1"]),
    "mlx4_1 and 0, then C and PU Affinity": (
        51, [f"GPU{at}" for at in range(7)] + [f"mlx4_{at}" for at in (7, 2, 5, 6, 10, 9, 0, 3, 8, 4, 1)]
    ),
    "C and PU Affinity before a row's C": (
        53, [f"GPU{at}/GI{at}" for at in range(9)] + [f"mlx5_bond_{at}" for at in (1, 2, 6, 0, 3, 4, 5)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("word", ["SOC", "NV18", "NODE"])
def test_half_a_name_or_title_begins_no_row(name: str, word: str) -> None:
    width, devices = HALVES[name]
    words = {(a, b): word for a in devices for b in devices if a != b}
    tails = {gpu: ["0-23,48-71", "7", "10"] for gpu in devices if gpu.startswith("GPU")}
    truth = Truth(devices, words, ["cpus", "numa", "gpu_numa"], tails)
    check(truth, "\n".join(wrapped(truth.lines(), width, trim=True)) + "\n" + LEGEND)


def test_a_long_word_does_not_hide_that_others_are_lost() -> None:
    gpus = [f"GPU{at}" for at in range(5)]
    words = {(a, b): "SYS" for a in gpus for b in gpus if a != b} | {("GPU1", "GPU3"): "<unknown>"}
    truth = Truth(gpus, words, [], {})
    lines = truth.lines()
    lines[2] = "GPU1\tSYS\t X \t<unknown>\tSYS"  # a word before <unknown> is lost
    matrix = read_matrix("\n".join(lines) + "\n" + LEGEND)
    assert matrix.words == {pair: word for pair, word in words.items() if pair[0] != "GPU1"}
    assert ["GPU1 is incomplete" in finding.what for finding in matrix.findings] == [True]


@given(truths(), st.integers(40, 260), st.booleans())
def test_a_word_that_nobody_knows_at_a_break_is_right_or_left_out(truth: Truth, width: int, trim: bool) -> None:
    matrix = read_matrix("\n".join(wrapped(truth.lines(), width, trim)) + "\n" + LEGEND)
    assert {pair: truth.words.get(pair) for pair in matrix.words} == matrix.words
    assert matrix.words == truth.words or matrix.findings
    said_is_true(truth, matrix)


@given(truths(), st.integers(1, 3))
def test_tabs_may_be_any_blanks(truth: Truth, blanks: int) -> None:
    check(truth, "\n".join(squeezed(truth.lines(), blanks)) + "\n" + LEGEND)


@given(truths(known=True))
def test_line_feeds_may_be_lost(truth: Truth) -> None:
    text = "GPU Topology: " + " ".join(" ".join(truth.lines()).split()) + " " + " ".join(LEGEND.split())
    check(truth, text)


@given(truths(), st.randoms(use_true_random=False))
def test_rows_may_stand_in_any_order(truth: Truth, random) -> None:  # type: ignore[no-untyped-def]
    header, *rows = truth.lines()
    random.shuffle(rows)
    check(truth, "\n".join([header, *rows]) + "\n" + LEGEND)


@given(truths(), st.sampled_from(["[node1] ", "2026-11-21 10:00:00 INFO ", "> ", "out | ", "# "]))
def test_each_line_may_have_something_in_front(truth: Truth, prefix: str) -> None:
    check(truth, "\n".join(prefix + line for line in truth.lines()) + "\n" + LEGEND)


@given(truths(), st.integers(0), st.sampled_from(["tabs", "blanks", "squeezed"]))
def test_a_cut_text_never_says_what_the_whole_did_not(truth: Truth, cut: int, style: str) -> None:
    lines = truth.lines()
    lines = [line.expandtabs(8) for line in lines] if style == "blanks" else lines
    lines = squeezed(lines, 2) if style == "squeezed" else lines
    text = "\n".join(lines) + "\n"
    kept = text[: cut % len(text)]
    matrix = read_matrix(kept)
    for pair, word in matrix.words.items():
        assert truth.words[pair] == word
    assert set(matrix.devices) <= set(truth.devices) or not matrix.words
    said_is_true(truth, matrix)
    if kept.count("\n") < len(truth.devices) and matrix.devices and matrix.words != truth.words:
        assert matrix.findings


@given(truths(), st.integers(0), st.integers(0))
def test_a_lost_stretch_never_makes_up_words(truth: Truth, start: int, length: int) -> None:
    """A piece lost in the midst of a row: what is left of it is right, or left out."""
    header, *rows = truth.lines()
    at = start % len(rows)
    row = rows[at]
    begin = len(row.split("\t")[0]) + 1 + start % max(1, len(row) - len(row.split("\t")[0]) - 1)
    cells = [cell for cell in range(len(row)) if row[cell] == "\t" and cell >= begin - 1]
    if len(cells) < 2:
        return
    stop = cells[1 + length % (len(cells) - 1)]
    rows[at] = row[: cells[0]] + row[stop:]
    matrix = read_matrix("\n".join([header, *rows]) + "\n" + LEGEND)
    for pair, word in matrix.words.items():
        assert truth.words[pair] == word
    if len(truth.tails) > 1:  # nobody can tell which value the only row lost: those of the others are the measure
        said_is_true(truth, matrix)


def said_is_true(truth: Truth, matrix: Matrix) -> None:
    for gpu, affinity in matrix.affinity.items():
        for title, value in zip(truth.titles, truth.tails[gpu], strict=True):
            assert getattr(affinity, title) in (value, "")


LOST = {
    "a node": ("0-127\t1", "0-127"),
    "processors": ("0-127\t1", "1"),
    "words and processors": ("0-127\tN/A\t\t10", "N/A\t\t10"),
}


@pytest.mark.parametrize("name", LOST)
def test_an_affinity_that_lost_a_value_is_left_out_and_reported(name: str) -> None:
    whole, rest = LOST[name]
    titles = "\t".join(["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][: len(whole.split())])
    matrix = read_matrix(f"\tGPU0\tGPU1\t{titles}\nGPU0\t X \tSYS\t{whole}\nGPU1\tSYS\t X \t{rest}\n" + LEGEND)
    assert list(matrix.affinity) == ["GPU0"]
    assert ["near GPU1 are unknown" in finding.what for finding in matrix.findings] == [True]


@given(st.text(alphabet="GPU01NIC mlx5_X\tSYNV\n-,/A<>CFfinty", max_size=300))
@example("")
@example("GPU0")
@example("\tGPU0\nGPU0\t")
@example("\tGPU0\nGPU0\tX")
@settings(max_examples=examples(300))
def test_nothing_raises(text: str) -> None:
    read_matrix(text)


@given(truths(), st.data())
def test_a_missing_row_is_named(truth: Truth, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(truth.devices))
    lines = [line for line in truth.lines() if line.split("\t")[0] != lost]
    matrix = read_matrix("\n".join(lines) + "\n" + LEGEND)
    if len(truth.devices) > 1:
        assert matrix.words == {pair: word for pair, word in truth.words.items() if pair[0] != lost}
        assert [f"no row for {lost}" in finding.what for finding in matrix.findings] == [True]


# ruff: noqa: ISC004, E501
ODD = {
    "WSL": ("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t\t\tN/A\n", {}, Affinity("", "", "N/A")),
    "GB200": (
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\t0-71\t0,2-17\t\t2\nGPU1\tNV18\t X \t72-143\t1,18-33\t\t10\n",
        {"GPU0-GPU1": "NV18", "GPU1-GPU0": "NV18"}, Affinity("0-71", "0,2-17", "2"),
    ),
    "words glued at a terminal's edge": (
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tNV18NODE\t0-55\nGPU1\tNV18\t X \tNODE\t0-55\n"
        "GPU2\tNODENODE\t X \t0-55\n",
        {"GPU0-GPU1": "NV18", "GPU0-GPU2": "NODE", "GPU2-GPU1": "NODE"}, Affinity("0-55"),
    ),
    "a drawn table, and a device of an unknown kind": (
        "|        |GPU0|GPU1|HSN|CPU Affinity|NUMA Affinity|\n+========+====+====+===+============+======+\n"
        "|**GPU0**|X   |SYS |PHB|48-63       |3            |\n+--------+----+----+---+------------+------+\n"
        "|**GPU1**|SYS |X   |SYS|32-47       |2            |\n|**HSN** |PHB |SYS |X  |            |      |\n",
        {"GPU0-GPU1": "SYS", "GPU0-HSN": "PHB", "HSN-GPU1": "SYS"}, Affinity("48-63", "3"),
    ),
    "a quoted string": (
        '"\\u001b[4m\\tGPU0\\tGPU1\\tCPU Affinity\\u001b[0m\\nGPU0\\t X \\tPHB\\t0-7\\nGPU1\\tPHB\\t X \\t0-7\\n\\n"',
        {"GPU0-GPU1": "PHB", "GPU1-GPU0": "PHB"}, Affinity("0-7"),
    ),
    "numbered lines": (
        "  1\t\tGPU0\tGPU1\tCPU Affinity\n  2\tGPU0\t X \tPHB\t0-3\n  3\tGPU1\tPHB\t X \t0-3\n",
        {"GPU0-GPU1": "PHB", "GPU1-GPU0": "PHB"}, Affinity("0-3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_forms(name: str) -> None:
    text, pairs, affinity = ODD[name]
    matrix = read_matrix(text)
    assert {pair: matrix.words[a, b] for pair in pairs for a, b in [tuple(pair.split("-"))]} == pairs
    assert matrix.affinity["GPU0"] == affinity
    assert len(matrix.words) == len(matrix.devices) * (len(matrix.devices) - 1)
    assert matrix.findings == ()


HEADER, FIRST, SECOND, THIRD = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\n",
    "GPU0\t X \tNV1\tSYS\t0-3\n",
    "GPU1\tNV1\t X \tSYS\t0-3\n",
    "GPU2\tSYS\tSYS\t X \t0-3\n",
)
BROKEN = {
    "no header": (FIRST + SECOND + THIRD, set(), "has no header"),
    "half a header": ("GPU2\tCPU Affinity\n" + FIRST + SECOND + THIRD, set(), "has 3 columns, but its header names 1"),
    "an empty cell": (HEADER + FIRST.replace("NV1", "") + SECOND + THIRD, {"GPU0-GPU1"}, "no word for GPU1"),
    "a row moved by one": (
        HEADER + FIRST + "GPU1\tNV1\tSYS\t X \t0-3\n" + THIRD, {"GPU1-GPU0", "GPU1-GPU2"}, "none of its words can be aligned",
    ),
    "rows that differ": (HEADER + FIRST + SECOND + THIRD + FIRST.replace("NV1", "NV2"), {"GPU0-GPU1"}, "two rows that differ"),
    "a row of a device that no column has": (
        HEADER + FIRST + SECOND + THIRD + "GPU7\tSYS\tSYS\tSYS\t0-3\n", set(), "GPU7 belong to no column",
    ),
    "both directions differ": (HEADER + FIRST + SECOND.replace("NV1", "NV2") + THIRD, set(), "GPU0 to GPU1 is NV1, back it is NV2"),
    "two matrices": ((HEADER + FIRST + SECOND + THIRD + "\n") * 2, set(), "holds 2 matrices"),
    "a header alone": (HEADER, {f"GPU{a}-GPU{b}" for a in range(3) for b in range(3) if a != b}, "a header and no rows"),
    "a cut word": (HEADER + FIRST + "GPU1\tNV", {f"GPU{a}-GPU{b}" for a in (1, 2) for b in range(3) if a != b}, "GPU1"),
    "a word that may be cut": (
        HEADER + FIRST.replace("NV1", "NV12") + "GPU1\tNV1",
        {f"GPU{a}-GPU{b}" for a in (1, 2) for b in range(3) if a != b}, "GPU1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_left_out_and_reported(name: str) -> None:
    text, lost, said = BROKEN[name]
    matrix = read_matrix(text)
    assert matrix.devices == ("GPU0", "GPU1", "GPU2")
    assert {f"GPU{a}-GPU{b}" for a in range(3) for b in range(3) if a != b} - {
        f"{a}-{b}" for a, b in matrix.words
    } == lost
    assert any(said in finding.what for finding in matrix.findings)


@pytest.mark.parametrize(
    "text", ["", "GPU0 and GPU1 are joined. OK\n", "GPU 0: NVIDIA A10 (UUID: GPU-1)\n", "GPU0  0  XGMI\n"]
)
def test_what_is_no_matrix_has_no_devices(text: str) -> None:
    assert read_matrix(text) == Matrix((), {})


def test_the_longest_matrix_is_read_in_time() -> None:
    gpus = [f"GPU{at}" for at in range(16)] + [f"NIC{at}" for at in range(18)]
    words = {(a, b): "NODE" for a in gpus for b in gpus if a != b}
    truth = Truth(gpus, words, ["cpus", "numa", "gpu_numa"], {gpu: ["0-63,128-191", "0", "N/A"] for gpu in gpus[:16]})
    text = "\n".join(truth.lines()) + "\n" + LEGEND
    took = []
    for _ in range(5):
        start = time.process_time()  # what others do on the machine is not the reader's
        matrix = read_matrix(text)
        took.append(time.process_time() - start)
    assert matrix.words == words
    assert min(took) < 0.1  # 4 ms on a machine that is not busy
