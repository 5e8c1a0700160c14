"""Answers questions about checkpoints on the host that holds them: `python -m psctl.checkpoint.tool VERB QUESTION`.

The question is JSON in the second argument, the answer one JSON document on standard output. An error is a document
too, with exit status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from psctl import errors
from psctl.checkpoint import catalog, reader
from psctl.checkpoint.disk import Disk
from psctl.checkpoint.export import export_model
from psctl.checkpoint.reader import open_checkpoint
from psctl.checkpoint.upload import CheckpointTarget
from psctl.checkpoint.writer import publish, remove_abandoned
from psctl.types import Document

Question = Document
Answer = Mapping[str, object]


def listing(question: Question) -> Answer:
    """Return the checkpoints of a job, or of all jobs, each with its folder."""
    found = catalog.list_checkpoints(Path(question["root"]), question.get("job"))
    return {"checkpoints": [each.document() for each in found]}


def show(question: Question) -> Answer:
    """Return the step of one checkpoint, for a caller that reads its manifest itself."""
    return {"step": open_checkpoint(_folder(question)).step}


def verify(question: Question) -> Answer:
    """Read every byte of a checkpoint; return its row with its problems."""
    folder = _folder(question)
    problems = reader.verify(folder)
    return catalog.read_entry(folder).verified_row(problems)


def newest(question: Question) -> Answer:
    """Return a job's newest checkpoint with correct bytes, and the reasons for which newer ones were skipped."""
    found = catalog.find_newest_verified(Path(question["root"]), question["job"])
    return {"step": found.manifest.step if found.manifest is not None else None, "skipped": list(found.skipped)}


def export(question: Question) -> Answer:
    """Write a verified checkpoint's model as one safetensors file."""
    folder = _folder(question)
    _refuse_damaged(folder)
    return {"bytes": export_model(folder, open_checkpoint(folder), Path(question["out"]))}


def prune(question: Question) -> Answer:
    """Remove a job's older checkpoints, and the files of writers that ended early."""
    remove_abandoned(Path(question["root"]))
    best = question.get("keep_best")
    removed = catalog.prune(Path(question["root"]), question["job"], question["keep"], tuple(best) if best else None)
    return {"removed": [each.document() for each in removed]}


def adopt(question: Question) -> Answer:
    """Verify a checkpoint that was copied here under a temporary name, and give it its final name."""
    partial, folder = Path(question["partial"]), Path(question["folder"])
    _refuse_damaged(partial)
    publish(partial, folder, Disk())
    return {"folder": str(folder)}


def target(question: Question) -> Answer:
    """Check that this Python has the package that reaches a job's `checkpoint.to`; the target is not asked."""
    CheckpointTarget(question["to"])
    return {}


def _folder(question: Question) -> Path:
    if "folder" in question:
        return Path(question["folder"])
    best = tuple(question.get("keep_best") or ("loss", "min"))
    return catalog.find_checkpoint(Path(question["root"]), question["job"], str(question["which"]), (best[0], best[1]))


def _refuse_damaged(folder: Path) -> None:
    problems = reader.verify(folder)
    if problems:
        open_checkpoint(folder)  # torn: an error of its own
        raise errors.CheckpointCorrupt(f"{folder}: {problems[0]}", hint="psctl checkpoint list", where=str(folder))


VERBS: Mapping[str, Callable[[Question], Answer]] = {
    "list": listing, "show": show, "verify": verify, "newest": newest, "export": export, "prune": prune, "adopt": adopt,
    "target": target,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Answer one question."""
    try:
        print(json.dumps(VERBS[arguments[0]](json.loads(arguments[1]))))
    except errors.PsctlError as error:
        print(json.dumps(error.document()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
