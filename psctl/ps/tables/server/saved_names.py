"""Names of the tensors of tables in a checkpoint, and the check that they hold every store completely.

store/STORE/LO-HI/...         all rows of a range of hash values, of SHARD_BITS bits, in hexadecimal
store/STORE/LO-HI+STEP/...    what the checkpoint of STEP changed in it; the earlier ones are in the same checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from psctl.errors import CheckpointCorrupt
from psctl.types import Range

ROOT = "store/"
"""What the names of all tensors of tables begin with."""

HASHES = 1 << 31
"""Hash values that the ranges of a store are cut from."""

WHOLE = -1
"""The step of a part that has all rows."""

_PLACE = re.compile(r"store/([^/]*)/([0-9a-f]{8})-([0-9a-f]{8})(?:\+([0-9]{1,18}))?/(.*)")


class SavedPlace(msgspec.Struct, frozen=True, order=True):
    """One part of one range of a store. `store` is quoted as in a URL; `inside`: the rest of a tensor's name."""

    store: str
    hashes: Range
    step: int = WHOLE
    inside: str = ""

    @property
    def prefix(self) -> str:
        """What the names of the part's tensors begin with."""
        added = "" if self.step == WHOLE else f"+{self.step}"
        return f"{ROOT}{self.store}/{self.hashes.start:08x}-{self.hashes.stop:08x}{added}/"


def read_name(name: str) -> SavedPlace:
    """Return what a tensor's name says. CheckpointCorrupt: it is no tensor of a store."""
    match = _PLACE.fullmatch(name)
    if match is None:
        raise CheckpointCorrupt(f"{name} is no tensor of a store")
    store, low, high, step, inside = match.groups()
    return SavedPlace(store, Range(int(low, 16), int(high, 16)), WHOLE if step is None else int(step), inside)


def find_parts(names: Iterable[str]) -> list[SavedPlace]:
    """Return the parts of a checkpoint, by store, range and step.

    Args:
        names: of its tensors.
    """
    found = (read_name(name) for name in names if name.startswith(ROOT) and name.endswith("/about"))
    return sorted(SavedPlace(each.store, each.hashes, each.step) for each in found if each.inside == "about")


def incomplete(names: Iterable[str]) -> str:
    """Return why the tensors do not hold every store completely; "" if they do."""
    parts = find_parts(names)
    whole = {(each.store, each.hashes) for each in parts if each.step == WHOLE}
    for each in parts:
        if (each.store, each.hashes) not in whole:
            return f"{each.prefix}about continues a part that is not there"
    ends: dict[str, int] = {}
    for store, hashes in sorted(whole):
        if hashes.start != ends.get(store, 0):
            return f"no part of it holds the hash values from {ends.get(store, 0):08x} on of store {store}"
        ends[store] = hashes.stop
    short = next((store for store, end in ends.items() if end != HASHES), None)
    return "" if short is None else f"no part of it holds the hash values from {ends[short]:08x} on of store {short}"
