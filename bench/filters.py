"""What the filters of a store leave of the pushes, and what they do to the result: two workers, two servers.

    python bench/filters.py [--passes 400]

Two jobs on this machine, once with each filter: l1 logistic regression by proximal gradient (filters_job/), where the
KKT filter works, and the logistic regression and DeepFM of templates/ctr. It prints Markdown for
docs/internals/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROXIMAL = (
    [], [{"kkt": {"every": 10}}], [{"kkt": {"every": 40}}], [{"significance": 0.5}], [{"random_skip": 0.25}],
    [{"kkt": {"every": 40}}, "bf16"],
)  # fmt: skip

CLICKS = (
    [], [{"significance": 1.0}], [{"random_skip": 0.25}], ["int8"], [{"significance": 1.0}, "int8"],
)  # fmt: skip


def train(job: Path, words: dict[str, object]) -> list[str]:
    """Run a job with arguments of its script; return the lines that it printed."""
    args = json.dumps([each for name, value in words.items() for each in (f"--{name}", str(value))])
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "psctl", "train", str(job), "-o", "jsonl", "--set", f"args={args}",
             "--workers", "2", "--servers", "2"],
            env={**os.environ, "HOME": home, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=1800, check=False, cwd=home,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return [event["text"] for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "log"]


def share(found: dict[str, float], what: str) -> str:
    """Return the share of rows or bytes that was filtered, in per cent."""
    return f"{100 * (1 - found[f'{what}_sent'] / found[what]):.1f} %" if what in found else "0 %"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=1, help="of templates/ctr")
    parser.add_argument("--only", default="proximal,logistic,deepfm")
    given = parser.parse_args()
    if "proximal" in given.only:
        print("| filters | rows filtered | bytes filtered | objective | weights not zero |\n|---|---|---|---|---|")
        for filters in PROXIMAL:
            texts = train(
                ROOT / "bench" / "filters_job" / "job.yaml", {"filters": json.dumps(filters), "passes": given.passes}
            )
            found = [json.loads(text.removeprefix("measured ")) for text in texts if text.startswith("measured ")][-1]
            print(
                f"| {json.dumps(filters)} | {share(found, 'rows')} | {share(found, 'bytes')} "
                f"| {found['objective']:.6f} | {found['not_zero']} |",
                flush=True,
            )
    for model in ("logistic", "deepfm"):
        if model not in given.only:
            continue
        print(f"\n{model}:\n\n| filters | rows filtered | bytes filtered | AUC |\n|---|---|---|---|")
        for filters in CLICKS:
            words = {"model": model, "epochs": given.epochs, "batch": 256, "filters": json.dumps(filters)}
            text = "\n".join(train(ROOT / "templates" / "ctr" / "job.yaml", words))
            auc = re.findall(r"AUC (\S+)", text)
            sent = [json.loads(each) for each in re.findall(r"sent (\{.*?\})", text)]
            found = sent[-1] if sent else {}
            print(
                f"| {json.dumps(filters)} | {share(found, 'rows')} | {share(found, 'bytes')} | {auc[0]} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
