"""`nvidia-smi topo -p2p` is read as it stands, and never taken for the matrix of links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.matrix import read_matrix, read_peers

CAPTURED = Path(__file__).parent.parent / "captured" / "p2p"
FILES = sorted(path.stem for path in CAPTURED.glob("*.txt"))
LEGEND = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  NS   = Not supported\n"


@pytest.mark.parametrize("name", FILES)
def test_captured_matrices_equal_what_was_checked_by_hand(name: str) -> None:
    text = (CAPTURED / f"{name}.txt").read_bytes().decode()
    facts = json.loads((CAPTURED / f"{name}.json").read_text())
    matrix = read_peers(text)
    assert {f"{a}-{b}": matrix.words[a, b] for a, b in (pair.split("-") for pair in facts["pairs"])} == facts["pairs"]
    count = facts["gpu_count"]
    assert matrix.devices == tuple(f"GPU{at}" for at in range(count))
    assert len(matrix.words) == count * (count - 1)
    assert matrix.findings == ()
    assert read_matrix(text).devices == ()


def test_there_are_captured_matrices() -> None:
    assert len(FILES) == 5


WORD = st.sampled_from(["OK", "NS", "CNS", "GNS", "TNS", "DR", "U", "XYZ"])


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, dict[tuple[str, str], str]]:
    """A matrix of 1 to 16 GPUs with tabs, blanks or wrapped, and its words."""
    gpus = [f"GPU{at}" for at in range(draw(st.integers(1, 16)))]
    style = draw(st.sampled_from(["tabs", "blanks", "squeezed", "wrapped"]))
    word = WORD.filter(lambda word: word != "XYZ") if style == "wrapped" else WORD
    words: dict[tuple[str, str], str] = {}
    for at, a in enumerate(gpus):
        for b in gpus[at + 1 :]:
            words[a, b] = words[b, a] = draw(word)
    lines = [" \t" + "\t".join(gpus) + "\t"]
    lines += [f" {a}\t" + "\t".join("X" if a == b else words[a, b] for b in gpus) + "\t" for a in gpus]
    if style == "blanks":
        lines = [line.expandtabs(8) for line in lines]
    if style == "squeezed":
        lines = [" ".join(line.split()) for line in lines]
    if style == "wrapped":
        width = draw(st.integers(40, 140))
        shown = [line.expandtabs(8).rstrip() for line in lines]
        lines = [line[at : at + width].rstrip() for line in shown for at in range(0, len(line), width)]
    return "\n".join(lines) + "\n" + LEGEND, words


@given(outputs(), st.sampled_from(["", "\ufeff", "user@node:~$ nvidia-smi topo -p2p r\n", "```\n"]), st.booleans())
def test_any_style_says_the_same(output: tuple[str, dict[tuple[str, str], str]], before: str, crlf: bool) -> None:
    text, words = output
    matrix = read_peers(before + (text.replace("\n", "\r\n") if crlf else text) + "\nDone.\n")
    assert matrix.words == words
    assert matrix.findings == ()


@given(outputs(), st.integers(0))
def test_a_cut_text_never_says_what_the_whole_did_not(output: tuple[str, dict[tuple[str, str], str]], cut: int) -> None:
    text, words = output
    matrix = read_peers(text[: cut % (len(text) - len(LEGEND))])
    assert {pair: words.get(pair) for pair in matrix.words} == matrix.words


def test_both_matrices_of_one_text_are_distinguished() -> None:
    links = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-3\nGPU1\tSYS\t X \t0-3\n\nLegend:\n\n  X    = Self\n"
    peers = " \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n" + LEGEND
    for text in (links + peers, peers + links):
        assert read_matrix(text).words == {("GPU0", "GPU1"): "SYS", ("GPU1", "GPU0"): "SYS"}
        assert read_peers(text).words == {("GPU0", "GPU1"): "NS", ("GPU1", "GPU0"): "NS"}
        assert not read_matrix(text).findings and not read_peers(text).findings


def test_one_gpu_alone_is_recognised_by_its_legend() -> None:
    text = " \tGPU0\t\n GPU0\tX\t\n"
    assert (read_peers(text + LEGEND).devices, read_matrix(text + LEGEND).devices) == (("GPU0",), ())
    assert (read_peers(text).devices, read_matrix(text).devices) == ((), ("GPU0",))


def test_a_missing_row_is_named() -> None:
    matrix = read_peers(" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n" + LEGEND)
    assert matrix.words == {("GPU0", "GPU1"): "OK"}
    assert [finding.what for finding in matrix.findings] == ["the matrix has no row for GPU1"]
