"""Every strategy on test hosts with shaped links, beside the engine, the bound and the prediction.

    python bench/strategies.py [--networks a,b] [--sizes 1MB,25MB,100MB] [--again 1MB,25MB] [--strategy S,S]

Test hosts of this machine (root, sshd, iproute2); iperf3 measures the payload rate B of a shaped link in the same run.
It runs `psctl up` (which measures the links), then `psctl bench allreduce -o json`, as a user would. It prints
Markdown for docs/internals/measurements.md. The bound is the least time of any schedule on that network:

    equal hosts             2 (n-1)/n S / B: every rank sends its part of the work
    one slow host           S / B_slow: it sends its gradients once, and gets the sum once
    two racks               S / B_between: each rack's sum crosses once
    two workers a host      2 (h-1)/h S / B among h hosts
    as many free hosts      S / B: workers push and pull once, servers do the rest
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from links import iperf  # noqa: E402

from psctl.units import format_bytes, parse_size  # noqa: E402
from tests.helpers.hosts import Hosts  # noqa: E402

DEALT = """
import os, time
rank, world, each = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
os.environ["RANK"] = str(rank % each * (world // each) + rank // each)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for size in SIZES:
    vector, times = torch.ones(size // 4), []
    for turn in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    if dist.get_rank() == 0:
        print("dealt", size, sorted(times[1:])[1], flush=True)
"""
"""The engine's all-reduce with neighbouring ranks on different hosts, as a launcher that deals them round has them."""


@dataclass
class Lab:
    """A network of test hosts.

    `bound` gives the seconds that S bytes take at best, B being the payload bytes/s of a link of `rate` Mbit/s.
    `aim` is how much faster than the engine what `auto` takes should be at 100 MB; 0: within 2 % of it.
    """

    title: str
    count: int
    rate: dict[str, str] | str
    link: int  # Mbit/s of the link that bounds
    bound: Callable[[float, float], float]
    engine: Callable[[float, float], float]
    aim: float = 0.0
    workers: str | None = None
    servers: str | None = None
    more: str = ""
    dealt: bool = False
    hosts: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def ring(ranks: int) -> Callable[[float, float], float]:
    """Return the time of a ring over equal ports."""
    return lambda size, rate: 2 * (ranks - 1) / ranks * size / rate


def once(size: float, rate: float) -> float:
    """Return the time of a vector that crosses a link once each way, both at once."""
    return size / rate


def equal(count: int, rate: int) -> Lab:
    """Return equal hosts."""
    return Lab(f"{count} equal hosts, {rate} Mbit/s", count, f"{rate}mbit", rate, ring(count), ring(count))


def labs() -> dict[str, Lab]:
    """Return the networks by name."""
    names = [f"h{index}" for index in range(1, 5)]
    two = "".join(f"  - {{name: {name}, address: {name}, slots: 2}}\n" for name in names)
    return {
        "equal4-200": equal(4, 200),
        "equal4-500": equal(4, 500),
        "equal8-200": equal(8, 200),
        "slow": Lab("4 hosts of 500 Mbit/s, one at a fifth", 4,
                    {**dict.fromkeys(names[:3], "500mbit"), "h4": "100mbit"}, 100, once, ring(4), 1.4),
        "racks": Lab("two racks of two hosts, 200 Mbit/s between, 500 inside", 4, "500mbit", 200, once, ring(4), 1.4,
                     options={"far": ("h3", "h4"), "trunk": "200mbit"}),
        "pairs": Lab("4 hosts of 500 Mbit/s, two workers each", 4, "500mbit", 500, ring(4), ring(8), 1.12,
                     workers="8", dealt=True, hosts=two.splitlines(keepends=True)),
        "free4": Lab("4 workers, 4 further hosts free to serve, 200 Mbit/s", 8, "200mbit", 200, once, ring(4), 1.4,
                     workers="4"),
    }  # fmt: skip


def cluster(lab: Lab, hosts: Hosts) -> str:
    """Return the cluster's file."""
    text = hosts.cluster_text(more=lab.more, messages=True)
    if not lab.hosts:
        return text
    head, _, _ = text.partition("hosts:\n")
    return head + "hosts:\n" + "".join(lab.hosts)


def run(home: dict[str, str], *words: str, seconds: float = 3600) -> Any:
    """Run psctl and return its document."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "psctl", *words, "-o", "json"], env={**home, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=seconds, check=False, cwd=home["HOME"],
    )  # fmt: skip
    print(f"<!-- psctl {' '.join(words)}: {time.monotonic() - began:.0f} s, exit {done.returncode} -->", flush=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout)


def measure(lab: Lab, sizes: str, strategies: str, again: str) -> tuple[float, list[dict[str, Any]]]:
    """Return the payload rate of the slowest link, and two outputs of bench: the second calibrated by the first."""
    with Hosts(2, rate=f"{lab.link}mbit") as pair:
        rate = iperf(pair, "auto")
    with Hosts(lab.count, rate=lab.rate, **lab.options) as hosts, tempfile.TemporaryDirectory() as folder:
        home = hosts.make_home(Path(folder) / "home")
        file = Path(folder) / "lab.yaml"
        file.write_text(cluster(lab, hosts))
        run(home.env, "up", str(file))
        words = ["bench", "allreduce", "--strategy", strategies]
        words += ["--workers", lab.workers] if lab.workers else []
        words += ["--servers", lab.servers] if lab.servers else []
        found = [run(home.env, *words, "--sizes", each) for each in (sizes, again) if each]
        if lab.dealt:
            found[0]["dealt"] = dealt(home.env, lab, [size["bytes"] for size in found[0]["sizes"]])
        return rate, found


def dealt(env: dict[str, str], lab: Lab, sizes: Sequence[int]) -> dict[int, float]:
    """Return the engine's seconds by size with ranks assigned to the hosts in turn."""
    folder = Path(env["HOME"]) / "dealt"
    folder.mkdir()
    (folder / "dealt.py").write_text(DEALT.replace("SIZES", repr(list(sizes))))
    (folder / "job.yaml").write_text(
        f"name: dealt\nscript: dealt.py\nworkers: {lab.workers}\nsync: {{strategy: native}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(folder / "job.yaml"), "-o", "jsonl"],
        env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, cwd=env["HOME"],
    )  # fmt: skip
    texts = [event["text"].split() for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "log"]
    return {int(words[1]): float(words[2]) for words in texts if words[:1] == ["dealt"]}


def table(lab: Lab, rate: float, documents: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: every strategy at every size, then the choice of `auto` and its distance from the bound."""
    first, *more = documents
    lines = [f"### {lab.title}", "", f"Payload rate of the bounding link (iperf3): {rate * 8e-6:.1f} Mbit/s.", ""]
    lines += ["| size | strategy | median s | of bound | faster than engine | predicted before | after | sum |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for size in first["sizes"]:
        rows = [row for row in first["results"] if row["bytes"] == size["bytes"]]
        native = next((row["seconds"]["median"] for row in rows if row["strategy"] == "native"), None)
        bound = lab.bound(size["bytes"], rate)
        for row in sorted(rows, key=lambda each: each["seconds"]["median"]):
            lines.append(_line(row, [_same(each, row) for each in more], bound, native, size))
    lines.append("")
    for document, when in zip(documents, ("", ", calibrated"), strict=False):
        lines += [_verdict(lab, size, rate, document, when) for size in document["sizes"]]
    for bytes_, seconds in first.get("dealt", {}).items():
        auto = next(each["auto"] for each in first["sizes"] if each["bytes"] == bytes_)
        took = _same(first, {"bytes": bytes_, "strategy": auto})
        gain = f"; what auto takes is {seconds / took['seconds']['median']:.2f} times as fast" if took else ""
        took_text = f"the engine with ranks assigned to hosts in turn takes {seconds:.4g} s{gain}"
        lines.append(f"- {format_bytes(bytes_)}: {took_text}")
    return "\n".join(lines) + "\n"


def _same(document: dict[str, Any], row: dict[str, Any]) -> dict[str, Any] | None:
    wanted = (row["bytes"], row["strategy"])
    return next((each for each in document["results"] if (each["bytes"], each["strategy"]) == wanted), None)


def _line(
    row: dict[str, Any],
    later: Sequence[dict[str, Any] | None],
    bound: float,
    native: float | None,
    size: dict[str, Any],
) -> str:
    median = row["seconds"]["median"]
    marks = "**" if row["strategy"] == size["winner"] else ""
    auto = " (auto)" if row["strategy"] == size["auto"] else ""
    ratios = [f"{each['predicted_seconds'] / each['seconds']['median']:.2f}" if each else "-" for each in (row, *later)]
    before, after = ratios[0], ratios[1] if len(ratios) > 1 else "-"
    gain = f"{native / median:.2f}" if native else "-"
    return (
        f"| {format_bytes(row['bytes'])} | {marks}{row['strategy']}{marks}{auto} | {median:.4g} | {median / bound:.3f} "
        f"| {gain} | {before} | {after} | {'right' if row['correct'] else 'WRONG'} |"
    )


def _verdict(lab: Lab, size: dict[str, Any], rate: float, document: dict[str, Any], when: str) -> str:
    times = {
        row["strategy"]: row["seconds"]["median"] for row in document["results"] if row["bytes"] == size["bytes"]
    }  # fmt: skip
    auto, bytes_ = times.get(size["auto"]), size["bytes"]
    regret = "-" if size["regret"] is None else f"{size['regret']:.1%}"
    said = f"- {format_bytes(bytes_)}{when}: auto takes {size['auto']}, regret {regret}"
    if auto and "native" in times:
        share = lab.bound(bytes_, rate) / auto
        aim = f", aim {lab.aim}" if lab.aim else ""
        said += f", {share:.1%} of the bound, {times['native'] / auto:.2f} times the engine{aim}"
        said += f"; the engine is at {times['native'] / lab.engine(bytes_, rate):.3f} of its own ring's bound"
    return said


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", default=",".join(labs()))
    parser.add_argument("--sizes", default="1MB,25MB,100MB")
    parser.add_argument("--strategy", default="all")
    parser.add_argument("--again", default="1MB,25MB", help="sizes of a second, calibrated bench; empty: none")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if shutil.which("iperf3") is None or os.getuid() != 0:
        print("needs root and iperf3")
        return 1
    assert all(parse_size(each) for each in given.sizes.split(",")), "sizes"
    everything = {}
    for name in given.networks.split(","):
        lab = labs()[name]
        rate, documents = measure(lab, given.sizes, given.strategy, given.again)
        everything[name] = {"rate": rate, "documents": documents}
        print(table(lab, rate, documents), flush=True)
        if given.json:
            given.json.write_text(json.dumps(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
