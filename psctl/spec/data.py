"""The keys `data` and `outputs` of job.yaml: files that hosts get before the job, and files that come back after it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from psctl.spec.fields import Doc, Section, text

URL = re.compile(r"[a-z][a-z0-9+.:-]*://.+")

DATA_PATH = text("a path or a URL", r"(?!-).+")

TO_PATH = text("a path in the job's folder", r"(?!-).+")


class DataSpec(Section, frozen=True):
    """Data that every host of the job gets once: a file or folder of this machine, or what a URL names."""

    source: Annotated[
        str,
        DATA_PATH,
        Doc("File or folder of this machine, relative to this file; or a URL that fsspec opens, fetched by each host."),
    ] = msgspec.field(name="from")
    to: Annotated[str, TO_PATH, Doc("Path in the folder in which the script runs; a link to the data.")]

    @property
    def url(self) -> bool:
        """Whether hosts fetch it from a URL."""
        return URL.fullmatch(self.source) is not None

    @property
    def place(self) -> str:
        """`to` in its plain form, without a slash at its end."""
        return posixpath.normpath(self.to)


def check_data(data: Sequence[DataSpec]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, message, hint) of places outside the job's folder, and of places that are in each other."""
    places: dict[str, int] = {}
    for index, each in enumerate(data):
        path, place = f"data[{index}].to", each.place
        if place.startswith(("/", "~", "../")) or place in (".", ".."):
            yield path, f"{each.to} is no path inside the folder in which the script runs", "such as to: data/corpus"
            continue
        for other, first in places.items():
            if place == other or f"{place}/".startswith(f"{other}/") or f"{other}/".startswith(f"{place}/"):
                yield path, f"{each.to} is the place of data[{first}] too, or one holds the other", "keep them apart"
                break
        places.setdefault(place, index)
        if "\n" in each.source:
            yield f"data[{index}].from", "a line break in a path", "rename it"


def check_outputs(patterns: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, message, hint) of patterns that can match nothing below the job's folder."""
    for index, pattern in enumerate(patterns):
        path = f"outputs[{index}]"
        if pattern.startswith("~") or ".." in pattern.split("/"):
            yield path, f"{pattern} leads out of the folder in which the script runs", "such as out/ or '*.png'"
        elif not pattern.strip().strip("/") or pattern.startswith("#"):
            yield path, f"{pattern!r} names no files", "such as out/ or '*.png'"
        elif pattern.startswith("/"):
            yield path, f"{pattern} is an absolute path", f"patterns start at the job's folder: {pattern.lstrip('/')}"
