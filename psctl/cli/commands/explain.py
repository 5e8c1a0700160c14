"""psctl explain: print what a key, a command, an event, an error code or an exit code means."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.core import TyperGroup

from psctl.cli.shared import completion
from psctl.cli.shared.context import Context
from psctl.types import Document

if TYPE_CHECKING:
    from psctl.view.console import Console


def explain(
    context: typer.Context,
    topic: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY|CODE|COMMAND...]",
            help="sync.consistency, 8, host-key-changed, train; without it all topics.",
            autocompletion=completion.topics,
        ),
    ] = None,
) -> None:
    """Explain a key of a file, a command, an event, or a code.

    Keys are those of cluster.yaml and job.yaml, by their path or their last word; codes are exit codes of psctl and
    codes of its errors.

    \b
    Examples:
      psctl explain sync.consistency
      psctl explain 8
      psctl explain checkpoint restore
    """
    import msgspec

    from psctl.cli.shared.topics import topics
    from psctl.errors import UsageError
    from psctl.spec.nearest import did_you_mean

    own = Context.of(context)
    every = topics(cast(TyperGroup, context.find_root().command))
    if not topic:
        kinds = dict.fromkeys(each.kind for each in every)
        listed = {kind: [each.name for each in every if each.kind == kind] for kind in kinds}
        own.print_result({"topics": listed}, _list)
        return
    wanted = " ".join(topic)
    found = [each for each in every if each.name == wanted]
    found = found or [each for each in every if each.kind.startswith("key") and each.name.endswith(f".{wanted}")]
    if not found:
        names = [each.name for each in every]
        raise UsageError(f"{wanted}: no such topic{did_you_mean(wanted, names)}", hint="psctl explain lists all topics")
    own.print_result({"topics": [msgspec.to_builtins(each) for each in found]}, _print)


def _list(console: Console, document: Document) -> None:
    from psctl.view.console import say

    for kind, names in document["topics"].items():
        say(console, f"{kind}:", *textwrap.wrap("  ".join(names), 100, initial_indent="  ", subsequent_indent="  "))


def _print(console: Console, document: Document) -> None:
    from psctl.view.console import say

    for each in document["topics"]:
        say(console, f"{each['name']} ({each['kind']})", "", each["text"], "")
