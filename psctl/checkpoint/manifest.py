"""The manifest of a checkpoint: one JSON file that is written last and contains its own checksum.

A checkpoint is a folder: `manifest.json`, `state.json` (rank 0's state), and one safetensors file a sender. The
manifest names each file's size and the checksum of every byte in it: the header's, and each slice's. The manifest's own
first line holds the checksum of the lines below it. So any changed byte is found and named. The first line also holds
the signature of that checksum by the job's authority, so that a reader with the authority's key detects any other
writer.

Slices of a tensor are half-open ranges of it laid flat. Together the slices of all files cover every named tensor
exactly once. Only a scalar (shape ()) may come from several senders (the step count of a parameter that is cut over two
servers); then all must be equal, and it counts once.

A sender may continue its part of an earlier checkpoint (format 2). The files of that part are in this folder too, by
hard links where the disk has these, as `SENDER-at-STEP.safetensors`; so a checkpoint needs no other one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from psctl import errors
from psctl.checkpoint import tensorfile
from psctl.checkpoint.disk import checksum
from psctl.types import UNDECODABLE, TensorSlice

FORMAT = 1
LINKED_FORMAT = 2
"""The format of a checkpoint that has files of earlier ones; a psctl that reads format 1 only would misread them."""

MANIFEST = "manifest.json"
STATE = "state.json"
MAX_MANIFEST = 1 << 28
"""Bytes of a manifest that are read at most."""

MAX_FILES = 1 << 16
"""Files of a checkpoint at most: one a sender."""

MAX_STATE = 1 << 30
"""Bytes of rank 0's state at most; it is read in one piece."""

MAX_DIMENSIONS = 64

_FIRST_LINE = re.compile(rb'\{"checksum":"([0-9a-f]{64})",(?:"signature":"((?:[0-9a-f]{2}){1,200})",)?')
_SIGNED = b"psctl checkpoint manifest\n"  # before the checksum in what is signed: the key signs other things too
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*\.safetensors")
_SENDER_FILE = re.compile(r"([a-z]+-[0-9]+)(?:-at-([0-9]{1,18}))?\.safetensors")


Sign = Callable[[bytes], bytes]
"""Signs bytes with the key of a job's authority."""


class StoredSlice(msgspec.Struct, frozen=True):
    """Elements [start, stop) of a tensor and where their bytes lie: `size` bytes from byte `offset` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    size: int
    checksum: str

    @property
    def slice(self) -> TensorSlice:
        """The slice without its position in the file."""
        return TensorSlice(self.name, self.dtype, self.shape, self.start, self.stop)


class TensorFile(msgspec.Struct, frozen=True):
    """One safetensors file. Sizes are bytes; `header` counts the length field and the JSON behind it."""

    name: str
    size: int
    header: int
    header_checksum: str
    slices: tuple[StoredSlice, ...]


class StateFile(msgspec.Struct, frozen=True):
    """Rank 0's state in state.json."""

    size: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of one checkpoint. `time` is seconds since the epoch; metrics that are not finite are None."""

    format: int
    job: str
    step: int
    epoch: int
    time: float
    version: str  # psctl's
    world: int
    servers: int
    strategy: str
    update: str
    seed: int
    code_hash: str
    metrics: dict[str, float | None]
    job_file: str
    state: StateFile
    files: tuple[TensorFile, ...]

    @property
    def id(self) -> str:
        """How users name it: `digits-3@500`."""
        return f"{self.job}@{self.step}"

    @property
    def bytes(self) -> int:
        """Bytes of tensors and state."""
        return self.state.size + sum(file.size for file in self.files)

    @property
    def written(self) -> int:
        """Bytes of tensors and state that no earlier checkpoint has."""
        return self.state.size + sum(file.size for file in self.files if earlier_step(file.name) is None)

    @property
    def earlier_steps(self) -> list[int]:
        """The steps of earlier checkpoints whose files this one has."""
        return sorted({step for file in self.files if (step := earlier_step(file.name)) is not None})

    def sizes(self) -> dict[str, int]:
        """Return the size of every file but the manifest, which does not contain its own."""
        return {STATE: self.state.size} | {file.name: file.size for file in self.files}


_MANIFEST = msgspec.json.Decoder(Manifest)
"""Made at import: msgspec crashes when several threads use a type for the first time at once."""


def earlier_step(name: str) -> int | None:
    """Return the step of the earlier checkpoint for which a file was written; None: it was written for this one."""
    match = _SENDER_FILE.fullmatch(name)
    return int(match[2]) if match is not None and match[2] else None


def files_of(manifest: Manifest, source: str) -> dict[str, TensorFile]:
    """Return the files of a sender ("tables/0") in a checkpoint, by name, as entries of a later one that has them."""
    found = {}
    for file in manifest.files:
        match = _SENDER_FILE.fullmatch(file.name)
        if match is not None and match[1] == source.replace("/", "-"):
            name = file.name if match[2] else f"{match[1]}-at-{manifest.step}.safetensors"
            found[file.name] = msgspec.structs.replace(file, name=name)
    return found


def shared_files(manifest: Manifest, earlier: Manifest) -> dict[str, str]:
    """Return those files of a checkpoint that an earlier one has with the same bytes, and their names in that one."""
    names = {msgspec.structs.replace(file, name=""): file.name for file in earlier.files}
    return {
        file.name: same
        for file in manifest.files
        if earlier_step(file.name) is not None
        and (same := names.get(msgspec.structs.replace(file, name=""))) is not None
    }


class Problem(msgspec.Struct, frozen=True):
    """One fault of a checkpoint; `torn` when something is missing, else bytes are wrong."""

    text: str
    torn: bool = False

    def error(self, where: str) -> errors.PsctlError:
        """Return the problem as the error to raise; `where` names the checkpoint."""
        kind = errors.CheckpointIncomplete if self.torn else errors.CheckpointCorrupt
        return kind(f"{where}: {self.text}", hint="use another checkpoint (psctl checkpoint list)", where=where)


def encode(manifest: Manifest, sign: Sign | None = None) -> bytes:
    """Return the manifest's file; `sign` returns the signature of the job's authority."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    rest = body.removeprefix(b"{").lstrip(b"\n") + b"\n"
    digest = checksum(rest).encode()
    signature = b'"signature":"' + sign(_SIGNED + digest).hex().encode() + b'",' if sign is not None else b""
    return b'{"checksum":"' + digest + b'",' + signature + b"\n" + rest


def signature_of(data: bytes) -> tuple[bytes, bytes] | None:
    """Return what was signed of a manifest's file that `decode` has read, and the signature; None when it has none."""
    match = _FIRST_LINE.fullmatch(data.partition(b"\n")[0])
    return (_SIGNED + match[1], bytes.fromhex(match[2].decode())) if match is not None and match[2] else None


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest's file and check that it is consistent.

    Args:
        data: the file's bytes.
        where: the checkpoint's folder, for messages.

    Raises:
        CheckpointCorrupt: a byte was changed, or its numbers contradict each other.
        CheckpointIncomplete: the slices leave a hole in a tensor.
        VersionMismatch: written by a later psctl in a format that this one does not support.
    """
    first, _, rest = data.partition(b"\n")
    match = _FIRST_LINE.fullmatch(first)
    if match is None or match[1].decode() != checksum(rest):
        raise Problem(f"{MANIFEST} is damaged: its bytes do not match its own checksum").error(where)
    try:
        format_found = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format", msgspec.Raw(b"0"))
        if bytes(format_found) not in (b"%d" % FORMAT, b"%d" % LINKED_FORMAT):
            raise errors.VersionMismatch(
                f"{where}: written in format {bytes(format_found).decode()}, this psctl reads formats {FORMAT} and "
                f"{LINKED_FORMAT}",
                hint="install the psctl that wrote it",
                where=where,
            )
        manifest = _MANIFEST.decode(data)
    except UNDECODABLE as error:
        raise Problem(f"{MANIFEST} is damaged: {error}").error(where) from error
    for problem in (*misplaced(manifest), *uncovered(manifest.files)):
        raise problem.error(where)
    return manifest


def misplaced(manifest: Manifest) -> Iterator[Problem]:
    """Yield the faults of the manifest alone: names, sizes, offsets."""
    if len(manifest.files) > MAX_FILES:
        yield Problem(f"{MANIFEST} names {len(manifest.files)} files, more than {MAX_FILES}")
    if not 0 <= manifest.state.size <= MAX_STATE or manifest.step < 0:
        yield Problem(f"{MANIFEST} is damaged: step {manifest.step}, {manifest.state.size} bytes of state")
    seen: set[str] = set()
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name in seen:
            yield Problem(f"{MANIFEST} names a file {file.name!r} that cannot be one of a checkpoint")
        seen.add(file.name)
        if not 0 <= file.header <= tensorfile.MAX_HEADER + 8:
            yield Problem(f"{file.name}: a header cannot have {file.header} bytes")
        end = file.header
        for piece in sorted(file.slices, key=lambda s: (s.offset, s.stop)):
            yield from _slice_problems(file.name, piece)
            if piece.offset != end:
                yield Problem(f"{file.name}: {piece.name} lies at byte {piece.offset}, expected {end}")
            end = piece.offset + piece.size
        if end != file.size:
            yield Problem(f"{file.name}: its slices end at byte {end}, its size is {file.size}")


def _slice_problems(file: str, piece: StoredSlice) -> Iterator[Problem]:
    if piece.dtype not in tensorfile.DTYPES:
        yield Problem(f"{file}: {piece.name} has the unknown dtype {piece.dtype}")
        return
    if len(piece.shape) > MAX_DIMENSIONS:
        yield Problem(f"{file}: {piece.name} has {len(piece.shape)} dimensions")
        return
    if not 0 <= piece.start <= piece.stop <= tensorfile.elements(piece.shape):
        yield Problem(f"{file}: {piece.name}[{piece.start}:{piece.stop}] is no part of shape {list(piece.shape)}")
    if piece.size != (piece.stop - piece.start) * tensorfile.width(piece.dtype):
        yield Problem(f"{file}: {piece.name}[{piece.start}:{piece.stop}] cannot have {piece.size} bytes")


def slices_by_name(files: Iterable[TensorFile]) -> dict[str, list[tuple[str, StoredSlice]]]:
    """Return each tensor's slices with their files, from its first element on."""
    found: dict[str, list[tuple[str, StoredSlice]]] = {}
    for file in files:
        for piece in file.slices:
            found.setdefault(piece.name, []).append((file.name, piece))
    for pieces in found.values():
        pieces.sort(key=lambda pair: (pair[1].start, pair[1].stop))
    return found


def uncovered(files: Iterable[TensorFile]) -> Iterator[Problem]:
    """Yield each tensor that the slices do not cover exactly once, or that senders disagree on."""
    for name, pairs in slices_by_name(files).items():
        pieces = [piece for _, piece in pairs]
        first = pieces[0]
        if any((piece.dtype, piece.shape) != (first.dtype, first.shape) for piece in pieces):
            yield Problem(f"{name}: senders disagree on its dtype or shape")
        elif first.shape == ():
            if any(piece.checksum != first.checksum or piece.stop != 1 for piece in pieces):
                yield Problem(f"{name}: senders hold different values of this scalar")
        else:
            yield from _gaps(name, tensorfile.elements(first.shape), pieces)


def _gaps(name: str, size: int, pieces: list[StoredSlice]) -> Iterator[Problem]:
    end = 0
    for piece in pieces:
        if piece.start < end:
            yield Problem(f"{name}: elements [{piece.start}:{min(end, piece.stop)}] are there twice")
        elif piece.start > end:
            yield Problem(f"{name}: elements [{end}:{piece.start}] are missing", torn=True)
        end = max(end, piece.stop)
    if end < size:
        yield Problem(f"{name}: elements [{end}:{size}] are missing", torn=True)


def whole_tensors(manifest: Manifest) -> list[TensorSlice]:
    """Return each tensor of the checkpoint once, as a slice of all of it, in the order of its files."""
    firsts = {name: pairs[0][1] for name, pairs in slices_by_name(manifest.files).items()}
    return [
        TensorSlice(name, piece.dtype, piece.shape, 0, tensorfile.elements(piece.shape))
        for name, piece in firsts.items()
    ]
