"""Reads checkpoints: opens and verifies them, and assembles any range of any tensor."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint import tensorfile
from psctl.checkpoint.disk import CHUNK, Unfit, content, new_checksum, pieces, regular_size
from psctl.checkpoint.manifest import MANIFEST, STATE, Manifest, Problem
from psctl.checkpoint.state_file import decode_state
from psctl.types import UNDECODABLE, State, TensorSlice

MOST_EXTRA = 100
"""Most names in a checkpoint's folder that are reported as no part of it."""


def folder_name(step: int) -> str:
    """Return the name of a step's folder, so that names sort as steps do."""
    return f"{step:010d}"


def open_checkpoint(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that its files exist with the right sizes (`verify` reads their bytes).

    Raises:
        CheckpointIncomplete: no manifest, or a file is missing or short.
        CheckpointCorrupt: the manifest was changed, or a file is too long.
        VersionMismatch: a later psctl wrote it.
    """
    manifest = read_manifest(folder)
    for problem in _file_problems(folder, manifest):
        raise problem.error(str(folder))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest alone. Raises as `open_checkpoint`."""
    return manifests.decode(manifest_bytes(folder), str(folder))


def manifest_bytes(folder: Path) -> bytes:
    """Return the bytes of a checkpoint's manifest.

    Raises:
        CheckpointIncomplete: there is none. CheckpointCorrupt: it is no regular file, or too large.
    """
    try:
        return content(folder / MANIFEST, manifests.MAX_MANIFEST)
    except Unfit as error:
        raise Problem(f"{MANIFEST}: {error.strerror}").error(str(folder)) from None
    except FileNotFoundError:
        raise Problem(f"it has no {MANIFEST}: its writer was ended before it was whole", torn=True).error(
            str(folder)
        ) from None
    except OSError as error:
        raise Problem(f"{MANIFEST} cannot be read: {os.strerror(error.errno or 0)}", torn=True).error(
            str(folder)
        ) from error


def _file_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    for name, size in manifest.sizes().items():
        try:
            found = regular_size(folder / name)
        except FileNotFoundError:
            yield Problem(f"{name} is missing", torn=True)
            continue
        except OSError as error:
            yield Problem(f"{name}: {error.strerror}")
            continue
        if found < size:
            yield Problem(f"{name} ends at byte {found}, it had {size}", torn=True)
        elif found > size:
            yield Problem(f"{name} has {found} bytes, it had {size}")


def problems(folder: Path, manifest: Manifest, trusted: Collection[str] = ()) -> Iterator[Problem]:
    """Yield the faults of a checkpoint; reads every byte of it, in small parts.

    Args:
        folder, manifest: the checkpoint.
        trusted: files of which only the size is compared.
    """
    known = {MANIFEST, *manifest.sizes()}
    with os.scandir(folder) as entries:
        others = (entry.name for entry in entries if entry.name not in known)
        extra = sorted(itertools.islice(others, MOST_EXTRA))
    for name in extra:
        yield Problem(f"{name} is not part of it")
    bad = list(_file_problems(folder, manifest))
    yield from bad
    if not bad:
        yield from _byte_problems(folder, manifest, trusted)


def _byte_problems(folder: Path, manifest: Manifest, trusted: Collection[str]) -> Iterator[Problem]:
    ranges = [(STATE, 0, manifest.state.size, manifest.state.checksum, "")]
    for file in (each for each in manifest.files if each.name not in trusted):
        ranges.append((file.name, 0, file.header, file.header_checksum, "header"))
        for piece in file.slices:
            label = tensorfile.entry_name(piece.slice)
            ranges.append((file.name, piece.offset, piece.offset + piece.size, piece.checksum, label))
    for name, start, stop, expected, label in ranges:
        running = new_checksum()
        try:
            for data in pieces(folder / name, start, stop):
                running.update(data)
        except OSError as error:
            yield Problem(f"{name} cannot be read: {error.strerror}", torn=True)
            continue
        if running.hexdigest() != expected:
            yield Problem(f"{name}: bytes of {label} were changed" if label else f"{name}: its bytes were changed")


def verify(folder: Path, trusted: Collection[str] = ()) -> list[str]:
    """Return the faults of a checkpoint, reading every byte of it; empty: it is complete and unchanged.

    Args:
        folder: the checkpoint.
        trusted: files that were verified as files of an earlier checkpoint; their bytes are not read again.
    """
    try:
        manifest = read_manifest(folder)
        return [problem.text for problem in problems(folder, manifest, trusted)]
    except errors.PsctlError as error:
        return [error.message.removeprefix(f"{folder}: ")]


def read_state(folder: Path, manifest: Manifest) -> State:
    """Return rank 0's state. CheckpointCorrupt when its bytes were changed."""
    running = new_checksum()
    data = content(folder / STATE, manifest.state.size)
    running.update(data)
    if running.hexdigest() != manifest.state.checksum:
        raise Problem(f"{STATE}: its bytes were changed").error(str(folder))
    try:
        return decode_state(data)
    except UNDECODABLE as error:
        raise Problem(f"{STATE} is damaged: {error}").error(str(folder)) from error


def read_slice(
    folder: Path, manifest: Manifest, wanted: TensorSlice, chunk: int = CHUNK
) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of any slice of any tensor, in order, however it was cut when it was saved.

    Args:
        folder, manifest: an open checkpoint.
        wanted: dtype and shape must be those that were saved.
        chunk: most bytes in one part.

    Yields:
        (byte offset from the start of the wanted slice, bytes).

    Raises:
        UsageError: the checkpoint has no such tensor, or one of another dtype or shape; the model differs.
        CheckpointIncomplete: a file became shorter.
    """
    pairs = manifests.slices_by_name(manifest.files).get(wanted.name)
    hint = "resume with the model and optimizer that were saved, or start anew: --resume never"
    if pairs is None:
        raise errors.UsageError(f"{manifest.id} has no tensor {wanted.name}", hint=hint, where=manifest.id)
    saved = pairs[0][1]
    if (saved.dtype, saved.shape) != (wanted.dtype, wanted.shape):
        raise errors.UsageError(
            f"{wanted.name} is {saved.dtype} {list(saved.shape)} in {manifest.id}, "
            f"{wanted.dtype} {list(wanted.shape)} is wanted",
            hint=hint,
            where=manifest.id,
        )
    if not 0 <= wanted.start <= wanted.stop <= tensorfile.elements(saved.shape):
        raise errors.UsageError(f"{wanted.name} has no elements [{wanted.start}:{wanted.stop}]", where=manifest.id)
    width = tensorfile.width(saved.dtype)
    at = wanted.start
    for name, piece in pairs:
        stop = min(piece.stop, wanted.stop)
        if piece.start <= at < stop:
            place = piece.offset - piece.start * width  # of element 0, were it in this file
            done = at * width
            for data in pieces(folder / name, place + done, place + stop * width, chunk):
                yield done - wanted.start * width, data
                done += len(data)
            if done != stop * width:
                raise Problem(f"{name} became shorter", torn=True).error(str(folder))
            at = stop
