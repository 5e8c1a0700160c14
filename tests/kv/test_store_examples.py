"""The examples of the store give their results, alone and under `psctl train` (all but one only in make soak)."""

from __future__ import annotations

import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

import psctl
from psctl.worker.init import make_standalone_run
from tests.helpers.running import Psctl

FOLDER = Path(__file__).parent.parent.parent / "templates" / "store"


def accurate(lines: list[str]) -> None:
    assert all(float(re.findall(r"accuracy ([\d.]+)", line)[0]) > 0.93 for line in lines)


def close(lines: list[str]) -> None:
    assert all(1.1 < float(re.findall(r"distance ([\d.]+)", line)[0]) < 1.4 for line in lines)


def counted(lines: list[str]) -> None:
    texts = [file.read_text() for file in FOLDER.glob("*.py")]
    words = Counter(word for text in texts for word in re.findall(r"[a-z]+", text.lower()))
    longest = max(len(line) for text in texts for line in text.splitlines())
    for line in lines:
        found = dict(re.findall(r"([a-z]+) (\d+)[,;]", line))
        assert len(found) == 5
        assert all(words[word] == int(count) for word, count in found.items())
        assert line.endswith(f"line {longest}")


def sampled(lines: list[str]) -> None:
    assert all("840 words counted" in line for line in lines)
    assert all(float(re.findall(r"purity ([\d.]+)", line)[0]) > 0.75 for line in lines)


def near(lines: list[str]) -> None:
    assert all(float(line.split()[-1]) < 1.0 for line in lines)


def bounded(lines: list[str]) -> None:
    for line in lines:
        assert "too small: 0;" in line, "an estimate is never below the count"
        assert float(re.findall(r"beyond the bound: ([\d.]+)", line)[0]) < 0.01
        assert line.endswith("most frequent: [0, 1, 2, 3, 4]")


EXAMPLES = {
    "sketch": bounded,
    "sgd": accurate,
    "kmeans": close,
    "wordcount": counted,
    "topics": sampled,
    "simple": near,
}


def test_all_examples_exist_and_are_short() -> None:
    scripts = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert scripts.keys() == EXAMPLES.keys() | {"rules"}
    assert max(scripts.values()) < 100
    code = (FOLDER / "simple.py").read_text().split('"""')[2].strip().splitlines()
    assert len([line for line in code if line]) <= 15


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs_alone(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []

    def init_alone():
        runs.append(make_standalone_run(0, 1, "alone"))
        return runs[0]

    monkeypatch.setattr(psctl, "init", init_alone, raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    runs[0].finish()
    EXAMPLES[name](capsys.readouterr().out.splitlines())


@pytest.mark.whole
@pytest.mark.parametrize(
    "name",
    ["wordcount", *(pytest.param(name, marks=pytest.mark.soak) for name in EXAMPLES if name != "wordcount")],
)
def test_an_example_runs_under_psctl_train(name: str, tmp_path: Path) -> None:
    run = Psctl(tmp_path).run("train", str(FOLDER / "job.yaml"), "--set", f"script={name}.py", "-o", "jsonl")
    assert run.code == 0, run
    EXAMPLES[name]([event["text"] for event in run.of("log") if event["stream"] == "stdout"])
    assert len([event for event in run.of("log") if event["stream"] == "stdout"]) == 2
