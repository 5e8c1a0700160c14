"""The fuzz targets, as data: for each parser of outside bytes a function that runs it, and inputs to begin with.

A target returns for any input, or raises an error of psctl's that names the fault (PsctlError). Any other exception, an
assertion, a hang or unbounded memory is a defect.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from psctl.checkpoint import manifest, state_file
from psctl.errors import PsctlError
from psctl.job import events
from psctl.job.job_permits import COORDINATION
from psctl.job.process_messages import ProcessFailure
from psctl.permits import NEW, Permits, why_refused
from psctl.ps.permits import PARAMETERS, TABLES
from psctl.remote import known_hosts, ssh_config
from psctl.spec import kinds
from psctl.spec.hosts import read_host_list, read_hostfile
from psctl.topology.host.document import read_cluster_document
from psctl.topology.host.host_graph import build_host_graph
from psctl.topology.readers import probe, recognise
from psctl.transport.protocol.message_assembly import Codec
from psctl.types import UNDECODABLE, Member, Role
from tests.fuzz import table_machines

ROOT = Path(__file__).resolve().parents[2]
CAPTURED = ROOT / "tests" / "captured"


class FuzzTarget(NamedTuple):
    """One parser under test."""

    run: Callable[[bytes], None]
    inputs: Callable[[], Iterable[bytes]]
    """Valid inputs, from which the fuzzer begins."""
    errors: tuple[type[Exception], ...] = (PsctlError,)
    """The errors that refuse an input."""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _files(*patterns: str) -> Iterable[bytes]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.stat().st_size < 20_000:
                yield path.read_bytes()


# ---- messages ------------------------------------------------------------------------------------------------------


ROLES: tuple[Role, ...] = ("agent", "coordinator", "server", "worker", "reader")


def _messages(permits: Permits) -> Callable[[bytes], None]:
    codec = Codec(permits)
    rows = {role: permits.to(role) for role in ROLES}

    def run(data: bytes) -> None:
        to, by = divmod((data[0] if data else 0) % len(ROLES) ** 2, len(ROLES))
        sender, receiver = ROLES[by], ROLES[to]
        header = data[1:]
        codec.admit(header, len(header))
        message = codec.decode(header)
        row = rows[receiver].get(sender, {}).get(type(message))
        why_refused(row, Member(sender, 0), message, NEW, 0)
        assert codec.decode(codec.encode(message)) == message or "nan" in repr(message)

    return run


def _encoded(permits: Permits) -> Callable[[], Iterable[bytes]]:
    """Return a maker of inputs: for each message its tag alone, and the tag with each field set to an empty value."""

    def inputs() -> Iterable[bytes]:
        for row in permits.rows:
            for sender, receiver in row.directions:
                head = bytes([ROLES.index(sender) + ROLES.index(receiver) * len(ROLES)])
                for value in (0, "", [], {}):
                    body: dict[str, Any] = {"type": row.name}
                    body.update({field.encode_name: value for field in msgspec.structs.fields(row.message)})
                    yield head + msgspec.msgpack.encode(body)

    return inputs


# ---- files and answers ---------------------------------------------------------------------------------------------


def _probe_output(data: bytes) -> None:
    build_host_graph(recognise.read_all(recognise.decode(data)))


def _host_facts(data: bytes) -> None:
    probe.parse_probe(_text(data))


def _spec(data: bytes) -> None:
    kinds.load(_text(data), "job.yaml")


def _host_file(data: bytes) -> None:
    read_hostfile(_text(data), "hosts")


def _host_list(data: bytes) -> None:
    read_host_list(_text(data))


def _document(data: bytes) -> None:
    read_cluster_document(json.loads(data))


def _manifest(data: bytes) -> None:
    """The input's body behind a right checksum: what a writer could have written."""
    body = data.partition(b"\n")[2] if data.startswith(b'{"checksum"') else data
    read = manifest.decode(b'{"checksum":"' + manifest.checksum(body).encode() + b'",\n' + body, "checkpoint")
    manifest.signature_of(data)
    assert manifest.shared_files(read, read).keys() <= read.sizes().keys()
    assert 0 <= read.written <= read.bytes
    assert read.step >= 0


def _state(data: bytes) -> None:
    state_file.decode_state(data)


def _event(data: bytes) -> None:
    for line in data.split(b"\n"):
        if line:
            events.from_line(line)


def _known_hosts(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        lines = known_hosts.read([file.name])
        known_hosts.judge(lines, ("h", "[h]:2222"), data[:100])
        known_hosts.known_kinds(lines, ("h",))
        known_hosts.is_revoked(file.name, data[-100:])


def _ssh_config(data: bytes) -> None:
    if b"nclude" in data.lower() or b"exec" in data.lower() or b"match" in data.lower():
        return  # other files and commands of the user: the file is the user's own
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        ssh_config.lookup("h", None, None, Path(file.name), Path("/nonexistent"))


def _manifests() -> Iterable[bytes]:
    digest = "0" * 64
    slices = (manifest.StoredSlice("w", "float32", (2, 3), 0, 6, offset=100, size=24, checksum=digest),)
    whole = manifest.Manifest(
        format=manifest.FORMAT, job="digits-1", step=3, epoch=1, time=1e9, version="0", world=2, servers=1,
        strategy="ps", update="server", seed=0, code_hash=digest[:12], metrics={"loss": 0.5}, job_file="name: digits",
        state=manifest.StateFile(2, digest),
        files=(manifest.TensorFile("part-0.safetensors", 124, 100, digest, slices),),
    )  # fmt: skip
    yield manifest.encode(whole)
    linked = manifest.TensorFile("tables-0-at-2.safetensors", 124, 100, digest, slices)
    yield manifest.encode(replace(whole, format=manifest.LINKED_FORMAT, files=(linked,)))


def _events() -> Iterable[bytes]:
    failure = ProcessFailure("worker/0", "h", 1, 1e9, 3, "ValueError: no", ["line"], [])
    ended = events.Finished(
        time=1e9, status="failed", exit=1, steps=0, seconds=0.0, metrics={}, failure=msgspec.to_builtins(failure)
    )
    yield events.to_line(ended)
    yield events.to_line(events.Started(time=1e9, job="digits-1", hosts=["h"], roles=[events.RoleOf("worker", 0, "h")]))
    yield events.to_line(events.CheckpointWritten(time=1e9, step=3, path="/c", bytes=8, seconds=0.5))
    yield events.to_line(events.Log(time=1e9, rank="worker/0", stream="stdout", text="hello"))


KNOWN_HOSTS = b"""h ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHr1oD0bZ2kqQy0m0mJ3cJxjZ7d3oJr0m9m8m7m6m5m4
|1|c2FsdHNhbHRzYWx0c2FsdHNhbHQ=|d2FudGVkd2FudGVkd2FudGVkd2FudGU= ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==
@revoked *.example,!h ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==
[h]:2222 ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ==
"""

SSH_CONFIG = b"""Host h *.lab !x
  HostName 10.0.0.1
  User "a b"
  Port=2222
  ProxyJump u@j:22,k
  IdentityFile ~/.ssh/%h
Host *
  CanonicalizeHostname no
"""

TARGETS: dict[str, FuzzTarget] = {
    "messages of the coordinator": FuzzTarget(_messages(COORDINATION), _encoded(COORDINATION)),
    "messages of parameter servers": FuzzTarget(_messages(PARAMETERS), _encoded(PARAMETERS)),
    "messages of tables": FuzzTarget(_messages(TABLES), _encoded(TABLES)),
    "a server of tables": FuzzTarget(table_machines.run_server, table_machines.to_server),
    "a worker of tables": FuzzTarget(table_machines.run_worker, table_machines.to_worker),
    "probe output": FuzzTarget(_probe_output, lambda: _files("tests/captured/*/*.txt", "tests/captured/*/*.xml")),
    "host facts": FuzzTarget(_host_facts, lambda: _files("tests/captured/*/*.txt")),
    "cluster and job files": FuzzTarget(_spec, lambda: _files("templates/*/*.yaml", "clusters/*.yaml")),
    "host files": FuzzTarget(_host_file, lambda: [b"a\nb:22\nc slots=4\n# c\n10.0.0.1\n"]),
    "host lists": FuzzTarget(_host_list, lambda: [b"a,b:22,10.0.0.1"], (ValueError,)),
    "topology document": FuzzTarget(_document, lambda: _files("clusters/*.json"), (PsctlError, *UNDECODABLE)),
    "manifest": FuzzTarget(_manifest, _manifests),
    "state of a checkpoint": FuzzTarget(
        _state, lambda: [b'{"step": 3, "a": [1.5, null, {"b": "\\ud800"}]}'], UNDECODABLE
    ),
    "event log": FuzzTarget(_event, _events, UNDECODABLE),
    "known_hosts": FuzzTarget(_known_hosts, lambda: [KNOWN_HOSTS]),
    "ssh config": FuzzTarget(_ssh_config, lambda: [SSH_CONFIG]),
}
