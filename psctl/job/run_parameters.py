"""The parameters of a run that experiment trackers show: the script's arguments, and how psctl runs it."""

from __future__ import annotations

from psctl.orders import JobOrder

LONGEST = 250
"""Characters of a value; trackers refuse longer ones."""

MOST = 100
"""Arguments that get a parameter of their own."""


def parameters_of(order: JobOrder) -> dict[str, str | int]:
    """Return the parameters of a job by name; an option of the script, `--lr 0.1`, is `args/lr`."""
    own: dict[str, str | int] = {
        "script": " ".join(order.argv)[:LONGEST],
        "hosts": len(order.hosts),
        "workers": sum(host.workers for host in order.hosts),
        "servers": "auto" if order.servers is None else order.servers,
        "strategy": order.strategy,
        "update": order.update,
        "seed": order.seed,
    }
    options = options_of(order.argv[2 if order.argv[:1] == ["-m"] else 1 :])
    return own | {f"args/{name}": value[:LONGEST] for name, value in list(options.items())[:MOST]}


def options_of(args: list[str]) -> dict[str, str]:
    """Return the options among arguments: `--lr 0.1`, `--lr=0.1`, and `--flag` as "true"."""
    found: dict[str, str] = {}
    for index, word in enumerate(args):
        if not word.startswith("--") or len(word) < 3:
            continue
        name, equals, value = word[2:].partition("=")
        following = args[index + 1] if index + 1 < len(args) else "--"
        found[name] = value if equals else "true" if following.startswith("--") else following
    return found
