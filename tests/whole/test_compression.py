"""Digits under each compression: as right as without, in fewer bytes; a checkpoint holds what pushes left out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Ended, Psctl, set_args

pytestmark = [pytest.mark.whole, pytest.mark.soak]

DIGITS = str(ROOT / "templates" / "digits" / "job.yaml")
QUIET = ("--set", "checkpoint.every=null", "--set", "checkpoint.on_stop=false")
CASES = {
    "bf16": ("sync.compression=bf16", "sync.update=server"),
    "fp16": ("sync.compression=fp16", "sync.update=server"),
    "int8": ("sync.compression=int8",),
    "onebit": ("sync.compression=onebit",),
    "topk": ("sync.compression.topk=0.01",),
    "random skip": ("sync.filters=[{random_skip: 0.5}]",),
    "significance": ("sync.filters=[{significance: 0.9}]",),
    "all": ("sync.compression=onebit", "sync.filters=[{random_skip: 0.25}, {significance: 0.5}]"),
    "bf16, workers step": ("sync.compression=bf16", "sync.update=worker"),
    "int8, workers step": ("sync.compression=int8", "sync.update=worker"),
    "int8, ssp": ("sync.compression=int8", "sync.consistency.ssp=2"),
    "bf16, ring": ("sync.compression=bf16", "sync.strategy=ring", "servers=auto"),
    "fp16, engine": ("sync.compression=fp16", "sync.strategy=native", "servers=auto"),
}
ONCE = 306_000  # bytes that both workers pull, or push, a step: 38,314 parameters

PARTS = {
    "bf16": 1.51, "fp16": 1.51, "int8": 1.26, "onebit": 1.04, "topk": 1.02, "random skip": 1.54,
    "bf16, workers step": 1.0, "int8, workers step": 1.26,
}  # fmt: skip
"""Of that, what travels: pushes that are coded, and pulls of values, which are not."""


def sets(words: tuple[str, ...]) -> list[str]:
    return [each for word in words for each in ("--set", word)]


def bytes_a_step(run: Ended) -> float:
    """Return what the workers sent and received a step, by what progress said."""
    told = run.of("progress")
    pairs = itertools.pairwise(told)
    moved = sum((after["time"] - before["time"]) * after["bytes_per_second"] for before, after in pairs)
    return float(moved / (told[-1]["step"] - told[0]["step"]))


def digits(home: Path, words: tuple[str, ...] = ()) -> tuple[float, float]:
    """Train; return how many of the digits are read right, and the bytes of a step."""
    psctl = Psctl(home, environment={"PSCTL_SHARED_MEMORY": "off"})
    run = psctl.run("train", DIGITS, "-o", "jsonl", *QUIET, *sets(words), timeout=300)
    assert run.code == 0, run
    return run.events[-1]["metrics"]["accuracy"], bytes_a_step(run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How many are read right without compression."""
    right, moved = digits(tmp_path_factory.mktemp("plain"))
    assert moved == pytest.approx(2 * ONCE, rel=0.05)
    return right


@pytest.mark.parametrize("name", CASES)
def test_digits_are_read_as_well_in_fewer_bytes(name: str, plain: float, tmp_path: Path) -> None:
    right, moved = digits(tmp_path, CASES[name])
    assert right >= plain - 0.01
    if name in PARTS:
        assert moved == pytest.approx(PARTS[name] * ONCE, rel=0.05)


@pytest.mark.parametrize("words", [CASES["onebit"], CASES["int8, workers step"]], ids=["servers step", "workers step"])
def test_a_checkpoint_holds_what_pushes_left_out(tmp_path: Path, words: tuple[str, ...]) -> None:
    psctl = Psctl(tmp_path)
    short = [*set_args("--epochs", "4"), "--set", "checkpoint.every=30 steps", *sets(words)]
    whole = psctl.run("train", DIGITS, "-o", "jsonl", *short, timeout=200)
    assert whole.code == 0, whole
    again = psctl.run("checkpoint", "restore", "digits-1@60", "-o", "jsonl", timeout=200)
    assert again.code == 0, again
    assert again.events[-1]["metrics"] == whole.events[-1]["metrics"], "to the bit"
    fewer = psctl.run("checkpoint", "restore", "digits-1@60", "--workers", "1", "-o", "jsonl", timeout=200)
    assert fewer.code == 0, fewer


def test_the_loss_of_a_killed_worker_names_what_is_lost_with_it(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    (tmp_path / "job").mkdir()
    text = (ROOT / "templates" / "digits" / "train.py").read_text()
    killed = "    for _ in run.epochs(options.epochs):\n"
    assert killed in text
    lines = """
    import signal
    once = Path(os.environ["HOME"]) / "killed"
"""
    text = text.replace(killed, lines + killed, 1)
    step = "            optimizer.step()\n"
    die = """            if os.environ["RANK"] == "1" and run.step == 40 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""
    assert step in text
    (tmp_path / "job" / "train.py").write_text(text.replace(step, die + step, 1))
    (tmp_path / "job" / "digits.csv.gz").write_bytes((ROOT / "templates" / "digits" / "digits.csv.gz").read_bytes())
    (tmp_path / "job" / "job.yaml").write_text(Path(DIGITS).read_text())
    run = psctl.run(
        "train", str(tmp_path / "job" / "job.yaml"), "-o", "jsonl", *set_args("--epochs", "6"), *QUIET,
        *sets(CASES["topk"]), timeout=200,
    )  # fmt: skip
    assert run.code == 0, run
    (lost,) = run.of("worker-lost")
    assert re.search("compressed pushes had not sent yet", lost["lost"])
    assert run.events[-1]["steps"] == 138
