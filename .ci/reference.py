"""Writes docs/reference/ from the code: `python .ci/reference.py`; a test compares it with what is committed."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "100"  # the width of the help
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from psctl.cli.app import GROUPS, make_command, name_of
from psctl.cli.shared.topics import EXITS, commands_of, error_codes, help_of, summary_of, tag_of, type_text
from psctl.job import events
from psctl.spec.key_reference import entries

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def code(text: str) -> str:
    """Return text for a cell of a table, as code."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def keys(file: str) -> str:
    """Return the page of a file's keys."""
    lines = [
        f"# {file}", "",
        "Every key with its values, its default and an example. `psctl explain KEY` prints the same, `psctl validate`",
        "checks a file, `psctl validate --schema` prints a JSON Schema for editors.", "",
        "| key | meaning | values | default | example |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for each in entries():
        if each.file == file:
            default = code(each.default) if each.default else ("" if each.value == "-" else "required")
            lines.append(
                f"| {code(each.path)} | {cell(each.text)} | {cell(each.value)} | {default} | {code(each.example)} |"
            )
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return the page of all commands."""
    root = make_command()
    words = [words for words, _ in commands_of(root)]
    lines = [
        "# Commands",
        "",
        "What `psctl COMMAND --help` prints. Global options stand before or after any command.",
        "",
    ]
    for title, members in GROUPS.items():
        names = [name_of(member) for member in members]
        lines += [f"## {title}", ""]
        for each in (each for each in words if each[0] in names):
            lines += [f"### psctl {' '.join(each)}", "", "```", help_of(root, each), "```", ""]
    return "\n".join(lines)


def events_page() -> str:
    """Return the page of the event log."""
    lines = [
        "# Events", "",
        "`psctl train -o jsonl` and `psctl attach -o jsonl` print an event a line; `event` is its kind, `time` seconds",
        "since the epoch on the head host.", "",
    ]  # fmt: skip
    for kind in events.PROMISED:
        lines += [f"## {tag_of(kind)}", "", summary_of(kind), "", "| field | type |", "|---|---|"]
        types = inspect.get_annotations(kind, eval_str=True)
        lines += [f"| `{field}` | {cell(type_text(each))} |" for field, each in types.items()]
        lines.append("")
    return "\n".join(lines)


def errors_page() -> str:
    """Return the page of error and exit codes."""
    lines = ["# Exit codes and errors", "", "| exit code | meaning | error codes |", "|---|---|---|"]
    for number, meaning in EXITS.items():
        names = [f"`{name}`" for name, kinds in error_codes().items() if kinds[0].exit == number]
        lines.append(f"| {number} | {meaning} | {', '.join(names)} |")
    lines += ["", 'With `-o json` an error is `{"error": {"code", "exit", "message", "hint", "where"}}`.', ""]
    for name, kinds in error_codes().items():
        lines += [f"## {name}", ""]
        for kind in kinds:
            lines += [summary_of(kind), ""]
            lines += [f"*Cure:* {kind.cure}", ""] if "cure" in vars(kind) else []
    return "\n".join(lines)


def python_page() -> str:
    """Return the page of what a script imports."""
    import psctl
    from psctl import nn
    from psctl.kv.store import Store
    from psctl.reader.group_reader import GroupReader
    from psctl.reader.live_rows import LiveStore
    from psctl.worker.run import Run

    lines = ["# In the script", ""]
    doors = {
        "init()": psctl.init, "accelerate_ddp(model)": psctl.accelerate_ddp, "init_reader()": psctl.init_reader
    }  # fmt: skip
    for name, function in doors.items():
        lines += [f"## psctl.{name}", "", "```", inspect.getdoc(function) or "", "```", ""]
    for title, kind in (("run", Run), ("store", Store), ("reader", GroupReader), ("reader.store()", LiveStore)):
        lines += [f"## {title}", "", "```", inspect.getdoc(kind) or "", "```", ""]
        members = {name: member for base in reversed(kind.__mro__[:-1]) for name, member in vars(base).items()}
        for name, member in sorted(members.items(), key=lambda each: each[0] not in vars(kind)):
            if name.startswith("_") or not inspect.getdoc(member) or name in ("finish", "hook_ddp", "step_reached"):
                continue
            shown = f"{title}.{name}" if isinstance(member, property) else f"{title}.{name}{signature(member)}"
            lines += [f"### {title}.{name}", "", "```", shown, "", inspect.getdoc(member) or "", "```", ""]
    for kind in (nn.SparseEmbedding, nn.SparseEmbeddingBag):
        lines += [f"## psctl.nn.{kind.__name__}", "", "```", inspect.getdoc(kind) or "", "```", ""]
    return "\n".join(lines)


def signature(function: object) -> str:
    """Return the parameters of a method without `self` and types."""
    found = inspect.signature(function)
    parts = [
        each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values() if each.name != "self"
    ]
    return str(inspect.Signature(parts))


def pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    return {
        "cluster.md": keys("cluster.yaml"), "job.md": keys("job.yaml"), "commands.md": commands(),
        "events.md": events_page(), "errors.md": errors_page(), "python.md": python_page(),
    }  # fmt: skip


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text.rstrip("\n") + "\n")
        print(f"wrote docs/reference/{name}")
