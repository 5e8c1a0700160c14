"""Reads machines from saved output: a file, a folder with one file per command, or a folder of such folders of hosts.

The kind of a file is recognised by its content alone; its name appears only in findings and errors. No network is used.
A file of unknown kind is an error when it is the only one, and a finding when other files of the host were read.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from psctl.errors import InvalidFile
from psctl.topology.findings import Finding
from psctl.topology.graph import ClusterGraph, HostGraph, HostNode
from psctl.topology.host.document import read_cluster_document
from psctl.topology.host.host_graph import build_host_graph
from psctl.topology.readers import recognise
from psctl.topology.readings import FailedOutput, Reading, UnknownOutput
from psctl.types import UNDECODABLE, JsonObject

LARGEST = 16_000_000
"""Limit of bytes of one file: the size of a document of `topo -o json` for a thousand hosts."""

LARGEST_TEXT = 2_000_000
"""Limit of bytes of one command's output: twice the output of lspci -vv on a server with hundreds of functions."""

MOST = 4096
"""Limit of entries of one folder."""

NAME = "saved"
"""The name of a host whose file contains no name."""

ACCEPTED = (
    "accepted are nvidia-smi topo -m, topo -p2p r, nvlink -s and --query-gpu=... --format=csv, lspci -vv, "
    "rocm-smi --showtopo, an NCCL topology file, and what topo -o json prints"
)


class UnreadableOutput(Exception):
    """A file that cannot be read as saved output.

    Args:
        why: the reason, as a clause that follows the name of the file.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class SavedMachines(msgspec.Struct, frozen=True):
    """Saved machines: their graph, and further values of a document.

    `about` holds cores and memory by host, `failed` the rows of hosts that failed when the document was written.
    """

    cluster: ClusterGraph
    about: dict[str, JsonObject] = {}
    failed: tuple[JsonObject, ...] = ()


class SavedOutputs(msgspec.Struct):
    """The contents of one host's files: documents, readings, and findings on refused files."""

    readings: list[Reading] = []
    documents: list[SavedMachines] = []
    refused: list[Finding] = []


def read_saved(reference: str) -> SavedMachines:
    """Read saved machines.

    Args:
        reference: a file, a folder, or "-" for standard input.

    Returns:
        The hosts, and the links between them that documents of `topo -o json` contain.

    Raises:
        InvalidFile: it cannot be read, or contains no known output.
    """
    path = Path(reference).expanduser()
    if reference != "-" and path.is_dir():
        return _folder(path)
    shown = "standard input" if reference == "-" else reference
    outputs = SavedOutputs()
    try:
        data = _whole(sys.stdin.fileno(), closing=False) if reference == "-" else _bytes(path, named=True)
        _understand(data, outputs)
    except UnreadableOutput as refused:
        raise InvalidFile(f"{shown}: {refused.why}", hint=ACCEPTED, where=shown) from None
    return _joined(outputs.documents or [_host(NAME, outputs, shown)], shown)


def _folder(path: Path) -> SavedMachines:
    """Read a folder: its files describe one host, and each of its folders another one."""
    files, folders = _entries(path)
    found = _host_of_folder(path.resolve().name or NAME, path, files) if files or not folders else []
    for folder in folders:
        inner, deeper = _entries(folder)
        extra = [_unread(f"{each.name}/", "a folder within a host's folder") for each in deeper]
        found += _host_of_folder(folder.name, folder, inner, extra)
    return _joined(found, str(path))


def _entries(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files and the folders of a folder, sorted by name, hidden folders left out."""
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise InvalidFile(f"{path}: {error.strerror}", hint="name a folder that can be read", where=str(path)) from None
    if len(entries) > MOST:
        raise InvalidFile(
            f"{path}: {len(entries)} entries, more than {MOST}",
            hint="one folder a host, one file a command",
            where=str(path),
        )
    folders = [entry for entry in entries if entry.is_dir()]
    return [entry for entry in entries if not entry.is_dir()], [each for each in folders if each.name[0] != "."]


def _host_of_folder(name: str, path: Path, files: Sequence[Path], extra: Sequence[Finding] = ()) -> list[SavedMachines]:
    outputs = SavedOutputs(refused=list(extra))
    for file in files:
        try:
            if file.name.startswith("."):
                raise UnreadableOutput("hidden")
            _understand(_bytes(file), outputs)
        except UnreadableOutput as refused:
            outputs.refused.append(_unread(file.name, refused.why))
    if not outputs.readings and not outputs.documents:
        reasons = "; ".join(finding.what for finding in outputs.refused[:3]) or "it is empty"
        raise InvalidFile(f"{path}: this folder has no known output: {reasons}", hint=ACCEPTED, where=str(path))
    return [*outputs.documents, *([_host(name, outputs, str(path))] if outputs.readings else [])]


def _unread(name: str, why: str) -> Finding:
    return Finding(f"{name} was not read: {why}", "leave only saved output in the folder, one file a command")


def _bytes(path: Path, *, named: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        path: the file.
        named: the user named it, so it may be a pipe, such as a shell's `<(command)`.

    Raises:
        UnreadableOutput: it is not a file, is too large or cannot be read.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or (named and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)))):
            raise UnreadableOutput("it is not a regular file")
        return _whole(os.open(path, os.O_RDONLY | os.O_CLOEXEC), closing=True)
    except OSError as error:
        raise UnreadableOutput(error.strerror or str(error)) from None


def _whole(descriptor: int, *, closing: bool) -> bytes:
    with open(descriptor, "rb", closefd=closing) as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UnreadableOutput(f"it is larger than {LARGEST // 10**6} MB; no such command prints that much")
    return data


def _understand(data: bytes, outputs: SavedOutputs) -> None:
    """Recognise the content of one file and add it to `outputs`.

    Raises:
        UnreadableOutput: its kind is unknown, or it is too large.
    """
    text = recognise.decode(data)
    if text.lstrip().startswith("{"):
        outputs.documents.append(_document(data))
        return
    if len(data) > LARGEST_TEXT:
        raise UnreadableOutput(f"it is larger than {LARGEST_TEXT // 10**6} MB; no such command prints that much")
    for reading in recognise.read_all(text):
        if isinstance(reading, UnknownOutput):
            begins = f'it is not a known output; it begins with "{reading.first[:60]}"'
            raise UnreadableOutput(begins if reading.first else "it is empty")
        outputs.readings.append(reading)


def _document(data: bytes) -> SavedMachines:
    """Read a document of `topo -o json`, or one host of it.

    Raises:
        UnreadableOutput: it is not JSON, or another kind of document.
    """
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise UnreadableOutput("its JSON is nested too deeply") from None
    except UNDECODABLE as error:
        raise UnreadableOutput(f"it begins as JSON and is not valid: {error}") from None
    try:
        if not isinstance(body, dict) or not ("hosts" in body or "devices" in body):
            raise UnreadableOutput('a JSON document with neither "hosts" nor "devices"')
        listed = body.get("hosts")
        hosts = [host for host in listed if isinstance(host, dict)] if isinstance(listed, list) else []
        failed = tuple(host for host in hosts if host.get("error"))
        if failed:
            body = {**body, "hosts": [host for host in body["hosts"] if host not in failed]}
        cluster = read_cluster_document(body)
    except InvalidFile as error:
        raise UnreadableOutput(error.message) from None
    rows = hosts or [body]
    about = {str(row.get("name")): {key: row.get(key) for key in ("cores", "memory")} for row in rows}
    return SavedMachines(cluster, about, failed)


def _host(name: str, outputs: SavedOutputs, shown: str) -> SavedMachines:
    graph = build_host_graph(outputs.readings)
    failed = any(isinstance(reading, FailedOutput) for reading in outputs.readings)
    if not graph.devices and not failed:
        why = "; ".join(finding.what for finding in graph.findings) or "it names no device"
        raise InvalidFile(f"{shown}: nothing can be read from it: {why}", hint="save the whole output", where=shown)
    whole = HostGraph(graph.devices, graph.links, (*graph.findings, *outputs.refused))
    return SavedMachines(ClusterGraph((HostNode(name, whole),)))


def _joined(parts: Sequence[SavedMachines], shown: str) -> SavedMachines:
    """Join the machines of several files.

    Raises:
        InvalidFile: two hosts have the same name.
    """
    hosts = [host for part in parts for host in part.cluster.hosts]
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "one folder a host, each with its own name"
        raise InvalidFile(f"{shown}: two hosts are named {twice}", hint=hint, where=shown)
    between = tuple(link for part in parts for link in part.cluster.between)
    about = {name: more for part in parts for name, more in part.about.items()}
    return SavedMachines(
        ClusterGraph(tuple(hosts), between), about, tuple(row for part in parts for row in part.failed)
    )
