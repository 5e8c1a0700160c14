"""`groups:` of a job file: further groups of processes that read the job's servers while the workers train."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from psctl.spec.fields import Doc, Section, text, whole

GROUP = r"[a-z][a-z0-9_-]{0,31}"
STORE = "store/"
"""Prefix of a pattern that names stores; others name parameters."""

Reads = Literal["auto", "bsp", "asp"]


class Spread(Section, frozen=True):
    """A bound on the steps by which the parameters of one read may differ."""

    ssp: Annotated[int, whole(0, 1_000_000), Doc("Steps by which parameters of one read may differ.")]


class GroupSpec(Section, frozen=True):
    """A group of processes that read parameters and stores of the job's servers, and take no part in training."""

    name: Annotated[str, text("a name of lower-case letters, digits, _ and -", GROUP), Doc("Group's name.")]
    script: Annotated[
        str | None, text("a path", r"(?!-).+"), Doc("Script to run, relative to workdir; or give module.")
    ] = None
    module: Annotated[
        str | None,
        text("a module such as pkg.evaluate", r"[^\W\d]\w*(\.[^\W\d]\w*)*"),
        Doc("Module to run, in place of script."),
    ] = None
    args: Annotated[tuple[str, ...], text(), Doc("Arguments of the script.")] = ()
    readers: Annotated[int, whole(1, 4096), Doc("Number of processes.")] = 1
    hosts: Annotated[
        tuple[str, ...], text("a host's name"), Doc("Hosts that they run on, in turn; empty: those with least to do.")
    ] = ()
    consistency: Annotated[
        Reads | Spread,
        Doc(
            "bsp: the parameters of one read are those of one step. asp: the newest of each shard. {ssp: N}: at most N "
            "steps apart. auto: asp where training is asp, else bsp."
        ),
    ] = "auto"
    keys: Annotated[
        tuple[str, ...],
        text("a pattern such as encoder.*"),
        Doc('Patterns of the parameters that it reads, and of its stores: "store/items"; empty: all.'),
    ] = ()

    @property
    def argv(self) -> list[str]:
        """Arguments of the interpreter."""
        return [*([self.script] if self.script is not None else ["-m", str(self.module)]), *self.args]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Patterns of parameters that it reads."""
        named = tuple(each for each in self.keys if not each.startswith(STORE))
        return named if self.keys else ("*",)

    @property
    def stores(self) -> tuple[str, ...]:
        """Patterns of stores that it reads."""
        named = tuple(each.removeprefix(STORE) for each in self.keys if each.startswith(STORE))
        return named if self.keys else ("*",)


def check_groups(groups: Sequence[GroupSpec], *, asynchronous: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (path, message, hint) of groups with one name, without a script, or with reads that cannot be.

    Args:
        groups: the groups.
        asynchronous: training is asp, under which versions of shards are not steps.
    """
    names = Counter(each.name for each in groups)
    for index, each in enumerate(groups):
        path = f"groups[{index}]"
        if names[each.name] > 1:
            yield f"{path}.name", f"{each.name} is the name of {names[each.name]} groups", "give each its own name"
        if (each.script is None) == (each.module is None):
            wrong = "neither script nor module" if each.script is None else "both script and module"
            yield f"{path}.script", f"{wrong} is given", "write script: evaluate.py, or module: pkg.evaluate"
        if each.script is not None:
            plain = posixpath.normpath(each.script)
            if plain.startswith(("/", "~", "../")) or plain in (".", ".."):
                text = f"{each.script} is outside workdir, the folder that is sent to the hosts"
                yield f"{path}.script", text, "write it relative to workdir"
        if asynchronous and each.consistency not in ("auto", "asp"):
            text = "needs versions that are steps, and under sync.consistency: asp each push makes one"
            yield f"{path}.consistency", text, "consistency: asp, or leave it out"
