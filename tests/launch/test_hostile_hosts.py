"""A compromised host answers as an attacker would: nothing of it is written elsewhere, here or on another host."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.export import export_model
from psctl.checkpoint.reader import read_state, verify
from psctl.checkpoint.writer import CheckpointWriter
from psctl.launch import agent_calls
from psctl.launch.checkpoints import checkpoint_actions, manifest_trust
from psctl.launch.home import HostRecord, JobRecord, KnownCluster, split_job
from psctl.launch.host_programs import HOST_STATE, SWEPT, run_program
from psctl.launch.jobs import job_logs
from psctl.launch.jobs.prepare import load_requested_job
from psctl.remote.shell import CommandResult
from psctl.transport.protocol.authority import Pair, make_authority, sign
from psctl.types import TensorSlice
from tests.helpers.fake_shell import FakeShell

JOB_FILE = "name: digits\nscript: train.py\n"
THERE = "/w/checkpoints/digits-1/0000000010"
KEY = "ssh-ed25519 AAAA attacker"


AUTHORITY = make_authority("digits-1", 1e9)
STRANGER = make_authority("digits-1", 1e9)


def record(authority: str = AUTHORITY.certificate_pem) -> JobRecord:
    return JobRecord(
        job="digits-1", name="digits", created=0.0, cluster=KnownCluster("lab", "", "", 0.0), hosts=[host("a", "/w")],
        job_file=JOB_FILE, job_source="job.yaml", job_folder="/", code_hash="c0de", checkpoints="/w/checkpoints",
        authority=authority,
    )  # fmt: skip


def host(name: str, workdir: str) -> HostRecord:
    return HostRecord(name, workdir, f"{workdir}/jobs/digits-1/{name}", "python3", f"{workdir}/code/psctl")


class Hostile:
    """A host that has a checkpoint and gives prepared answers about it."""

    def __init__(self, tmp_path: Path) -> None:
        folder = tmp_path / "made" / "digits-1" / "0000000010"
        writer = CheckpointWriter(folder, "digits-1", 10)
        writer.open_file("worker/0", [TensorSlice("param/w", "float32", (4,), 0, 4)])
        writer.write_part("worker/0", 0, 0, bytes(range(16)))
        writer.finish_file("worker/0")
        self.manifest = writer.commit(
            time=100.0, world=2, servers=1, epoch=1, strategy="ps", update="server", seed=0, code_hash="c0de",
            metrics={}, job_file=JOB_FILE, state={"step": 10}, sign=partial(sign, AUTHORITY),
        )  # fmt: skip
        self.shell = FakeShell("a")
        self.answers: dict[str, Any] = {
            "show": {"step": 10}, "verify": self.row(verified=True, problems=[]), "export": {"bytes": 10},
        }  # fmt: skip
        self.shell.on("env", self._tool)
        for path in folder.iterdir():
            self.shell.append(f"{THERE}/{path.name}", path.read_bytes())

    @staticmethod
    def row(**more: Any) -> dict[str, Any]:
        return {
            "id": "x", "job": "digits-1", "step": 10, "time": 1.0, "bytes": 8, "complete": True, "metrics": {}, **more,
        }  # fmt: skip

    def forge(self, authority: Pair | None = AUTHORITY, **changes: Any) -> None:
        """Have it hold another manifest, its own checksum right, signed by whom it may (a head holds its job's key)."""
        forged = msgspec.structs.replace(self.manifest, **changes)
        data = manifests.encode(forged, partial(sign, authority) if authority else None)
        self.shell.files[f"{THERE}/manifest.json"] = data

    def _tool(self, argv: Sequence[str], stdin: bytes) -> CommandResult:
        answer = self.answers[argv[5]]
        return CommandResult(0, answer if isinstance(answer, bytes) else json.dumps(answer).encode(), b"")


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The operator's folder, deep enough that ../ leads to something of theirs."""
    mine = tmp_path / "home" / "work" / "pulled"
    mine.mkdir(parents=True)
    return mine


def pull(hostile: Hostile, here: Path) -> Path:
    return checkpoint_actions.pull(hostile.shell, checkpoint_actions.locate(hostile.shell, record(), "10"), here)


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_names_in_the_answer_are_not_used(hostile: Hostile, here: Path) -> None:
    """The class of scp's CVE-2019-6111: a host that is asked for one thing and names others."""
    hostile.answers["show"] |= {
        "id": "../../x@10", "folder": "/etc", "files": {"../../../.ssh/authorized_keys": len(KEY), "/tmp/owned": 1},
    }  # fmt: skip
    hostile.shell.append("/etc/../../../.ssh/authorized_keys", KEY.encode())
    target = pull(hostile, here)
    assert verify(target) == []
    assert below(here.parent.parent) == [
        "work", "work/pulled", "work/pulled/digits-1@10",
        *(f"work/pulled/digits-1@10/{name}" for name in ("manifest.json", "state.json", "worker-0.safetensors")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["../../.ssh/authorized_keys", "/tmp/owned.safetensors", "a/b.safetensors", ".bashrc", "x.safetensors\n", "..", ""],
)
def test_names_in_the_manifest_are_checked_before_anything_is_written(hostile: Hostile, here: Path, name: str) -> None:
    file = hostile.manifest.files[0]
    hostile.forge(files=(msgspec.structs.replace(file, name=name),))
    hostile.shell.append(f"{THERE}/{name}", KEY.encode())
    with pytest.raises(errors.CheckpointCorrupt, match="cannot be one of a checkpoint"):
        pull(hostile, here)
    assert below(here) == []


def forged_longer(hostile: Hostile) -> None:
    hostile.shell.append(f"{THERE}/worker-0.safetensors", b"x" * 1000)


def forged_shorter(hostile: Hostile) -> None:
    path = f"{THERE}/worker-0.safetensors"
    hostile.shell.files[path] = hostile.shell.files[path][:-1]


def forged_bytes(hostile: Hostile) -> None:
    path = f"{THERE}/worker-0.safetensors"
    hostile.shell.files[path] = hostile.shell.files[path][:-1] + b"?"


def forged_state(hostile: Hostile) -> None:
    hostile.shell.files[f"{THERE}/state.json"] = b"{}"


def forged_manifest(hostile: Hostile) -> None:
    hostile.shell.append(f"{THERE}/manifest.json", b" ")


@pytest.mark.parametrize(
    "forge",
    [forged_longer, forged_shorter, forged_bytes, forged_state, forged_manifest],
    ids=lambda each: each.__name__,
)
def test_a_file_that_differs_from_the_manifest_leaves_nothing_here(hostile: Hostile, here: Path, forge: Any) -> None:
    forge(hostile)
    with pytest.raises((errors.CheckpointCorrupt, errors.CheckpointIncomplete, errors.CommandFailed)):
        pull(hostile, here)
    assert below(here) == []


@pytest.mark.parametrize("step", [11, -1, 10**30, "../../x", None])
def test_another_step_than_was_requested_is_refused(hostile: Hostile, here: Path, step: Any) -> None:
    hostile.answers["show"] = {"step": step}
    with pytest.raises((errors.CheckpointCorrupt, errors.CommandFailed)):
        pull(hostile, here)
    assert below(here) == []


@pytest.mark.parametrize("changes", [{"job": "../../x"}, {"job": "other-1"}, {"step": 11}])
def test_the_manifest_of_another_checkpoint_is_refused(
    hostile: Hostile, here: Path, changes: Mapping[str, Any]
) -> None:
    hostile.forge(**changes)
    with pytest.raises(errors.CheckpointCorrupt, match="its manifest is that of"):
        pull(hostile, here)
    assert below(here) == []


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"[" * 5000, b'{"step": {}}', b"\xff"])
def test_an_answer_that_is_none_is_reported(hostile: Hostile, answer: bytes) -> None:
    hostile.answers["show"] = answer
    with pytest.raises(errors.CommandFailed, match=r"psctl.checkpoint.tool show"):
        checkpoint_actions.locate(hostile.shell, record(), "latest")


def test_a_link_that_waits_here_is_not_followed(hostile: Hostile, here: Path, tmp_path: Path) -> None:
    (here / "digits-1@10").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UsageError, match="exists already"):
        pull(hostile, here)
    assert not (tmp_path / "elsewhere").exists()


def test_only_proved_files_reach_another_host(hostile: Hostile) -> None:
    hostile.answers["show"] |= {"files": {"../../../.bashrc": 1}, "folder": "/etc"}
    found = checkpoint_actions.locate(hostile.shell, record(), "10")
    other = FakeShell("b")
    told: list[dict[str, Any]] = []

    def tool(argv: Sequence[str], stdin: bytes) -> CommandResult:
        told.append(json.loads(argv[6]))
        answer = {"verify": Hostile.row(verified=False, problems=["none"]), "adopt": {"folder": "/etc"}}[argv[5]]
        return CommandResult(0, json.dumps(answer).encode(), b"")

    other.on("env", tool)
    folder = checkpoint_actions.bring(hostile.shell, found, other, host("b", "/v"))
    assert folder == "/v/checkpoints/digits-1/0000000010"
    partial = told[-1]["partial"]
    assert partial.startswith(f"{folder}.")
    assert partial.endswith(".partial")
    assert sorted(other.files) == [
        f"{partial}/{name}" for name in ("manifest.json", "state.json", "worker-0.safetensors")
    ]
    forged_bytes(hostile)
    other.files.clear()
    with pytest.raises(errors.CheckpointCorrupt):
        checkpoint_actions.bring(hostile.shell, found, other, host("b", "/v"))
    assert other.files == {}


def test_an_exported_model_is_compared_with_the_manifest(hostile: Hostile, here: Path, tmp_path: Path) -> None:
    found = checkpoint_actions.locate(hostile.shell, record(), "10")
    good = tmp_path / "good"
    export_model(tmp_path / "made/digits-1/0000000010", hostile.manifest, good)
    out = here / "model.safetensors"

    def there(data: bytes) -> None:
        def answer(argv: Sequence[str], stdin: bytes) -> CommandResult:
            hostile.shell.files[json.loads(argv[6])["out"]] = data
            return CommandResult(0, b'{"bytes": 1}', b"")

        hostile.shell.on("env", answer)

    for forged in (good.read_bytes()[:-1] + b"?", b"?" + good.read_bytes()[1:], good.read_bytes()[:-4], b""):
        there(forged)
        with pytest.raises((errors.CheckpointCorrupt, errors.CheckpointIncomplete)):
            checkpoint_actions.export(hostile.shell, found, out)
        assert below(here) == []
    there(good.read_bytes() + b"more")
    with pytest.raises(errors.CommandFailed, match="at most"):
        checkpoint_actions.export(hostile.shell, found, out)
    there(good.read_bytes())
    assert checkpoint_actions.export(hostile.shell, found, out) == good.stat().st_size
    assert out.read_bytes() == good.read_bytes()
    assert below(here) == ["model.safetensors"]


def test_code_is_proved_before_it_goes_to_other_hosts(hostile: Hostile) -> None:
    found = checkpoint_actions.locate(hostile.shell, record(), "10")
    tar = b"a tar"
    name = hashlib.sha256(tar).hexdigest()[:40]
    sites: Any = {"b": type("Site", (), {"codes": {name: False}})}
    path = f"/w/code/{name}.tar.gz"
    for forged in (gzip.compress(b"another tar"), b"no archive", gzip.compress(tar)[:-6], b""):
        hostile.shell.files[path] = forged
        with pytest.raises(errors.NoSuchCheckpoint, match="its code is no longer on a as it was sent"):
            checkpoint_actions.bring_code(hostile.shell, found.host, found.id, sites, name)
    hostile.shell.files[path] = gzip.compress(tar)
    archive = checkpoint_actions.bring_code(hostile.shell, found.host, found.id, sites, name)
    assert archive is not None
    assert gzip.decompress(archive.data) == tar


def test_rows_are_of_the_requested_job(hostile: Hostile) -> None:
    forged = Hostile.row(folder="/etc", problem="", verified=False, problems=["bad"])
    forged |= {"job": "x; rm -rf ~", "id": "$(reboot)"}
    hostile.answers["verify"] = forged
    row = checkpoint_actions.examine(hostile.shell, record(), "10")
    assert (row["id"], row["job"], row["folder"]) == ("digits-1@10", "digits-1", THERE)


@pytest.mark.parametrize(
    "forged",
    [
        {}, {"alive": True}, {"alive": True, "ranks": [1, 2]}, {"alive": True, "ranks": {"worker/0": 7}},
        {"alive": False, "ranks": {}, "finished": {"status": "../../x", "exit": 0, "steps": 1}},
        {"alive": False, "ranks": {}, "finished": {"status": "done", "exit": "0", "steps": 1}},
        {"alive": False, "ranks": {}, "plan": {"size": [[]]}}, [], "x",
    ],
)  # fmt: skip
def test_a_heads_answer_never_damages_the_record_of_a_job(forged: Any) -> None:
    shell, head = FakeShell("a"), record().head
    shell.on("python3", CommandResult(0, json.dumps({head.job_dir: forged}).encode(), b""))
    with pytest.raises(errors.CommandFailed, match=r"unexpected answer|it lacks"):
        agent_calls.digests(shell, [head])


def test_a_number_that_a_host_sends_does_not_use_up_the_names_of_jobs() -> None:
    assert split_job("digits-" + "9" * 5000) is None
    assert split_job("digits-999999999") == ("digits", 999999999)


@pytest.mark.parametrize("authority", [None, STRANGER], ids=["unsigned", "another"])
def test_a_manifest_that_its_job_did_not_sign_is_corrupt(hostile: Hostile, here: Path, authority: Pair | None) -> None:
    hostile.forge(authority)
    with pytest.raises(errors.CheckpointCorrupt, match=r"manifest.json is not signed.*authority of digits-1"):
        pull(hostile, here)
    assert below(here) == []
    row = checkpoint_actions.examine(hostile.shell, record(), "10")
    assert (row["verified"], row["signed"]) == (False, "other" if authority else "none")
    assert "is not signed" in row["problems"][0]


def test_a_signature_of_something_else_does_not_count(hostile: Hostile) -> None:
    data = hostile.shell.files[f"{THERE}/manifest.json"]
    hostile.forge(None, seed=7)
    forged = hostile.shell.files[f"{THERE}/manifest.json"]
    begin = data.index(b'"signature"')
    signature = data[begin : data.index(b"\n")]
    hostile.shell.files[f"{THERE}/manifest.json"] = forged.replace(b"\n", signature + b"\n", 1)
    with pytest.raises(errors.CheckpointCorrupt, match="is not signed by the authority"):
        checkpoint_actions.locate(hostile.shell, record(), "10")


def test_the_signer_is_reported(hostile: Hostile) -> None:
    row = checkpoint_actions.examine(hostile.shell, record(), "10")
    assert (row["verified"], row["signed"], row["problems"]) == (True, "job", [])
    assert checkpoint_actions.locate(hostile.shell, record(), "10").brief["signed"] == "job"
    old = record(authority="")  # of a job that was started before manifests were signed
    assert checkpoint_actions.examine(hostile.shell, old, "10")["signed"] == "other"
    hostile.forge(None)
    row = checkpoint_actions.examine(hostile.shell, old, "10")
    assert (row["verified"], row["signed"]) == (True, "none")
    assert checkpoint_actions.locate(hostile.shell, old, "10").step == 10


ATTACK = JOB_FILE + "secrets: [AWS_SECRET_ACCESS_KEY]\nenv: {GITHUB_TOKEN: null}\n"
CODE = "0123456789abcdef0123456789abcdef01234567"


def never(lines: list[str]) -> bool:
    raise AssertionError(f"asked about {lines}")


def test_a_restored_job_runs_what_this_machine_recorded(hostile: Hostile) -> None:
    mine = record()
    found = manifest_trust.source_of(mine, hostile.manifest, never)
    assert (found.job_file, found.code, found.own) == (JOB_FILE, "c0de", True)
    shown: list[str] = []

    def agree(lines: list[str]) -> bool:
        shown.extend(lines)
        return True

    forged = msgspec.structs.replace(hostile.manifest, job_file=ATTACK, code_hash=CODE)
    found = manifest_trust.source_of(mine, forged, agree)
    assert (found.job_file, found.code, found.own) == (ATTACK, CODE, False)
    assert "+secrets: [AWS_SECRET_ACCESS_KEY]" in shown
    assert shown[-2:] == ["-code c0de", f"+code {CODE}"]
    with pytest.raises(errors.UsageError, match="nothing was done"):
        manifest_trust.source_of(mine, forged, lambda lines: False)
    for bad in ("../../../tmp/evil", "", "c0de", CODE + "/.."):
        with pytest.raises(errors.UsageError, match="names no code"):
            manifest_trust.source_of(mine, msgspec.structs.replace(forged, code_hash=bad), agree)
    for text in (JOB_FILE.replace("\n", "\r\n"), JOB_FILE + "\n", JOB_FILE + " "):
        shown.clear()
        manifest_trust.source_of(mine, msgspec.structs.replace(forged, job_file=text, code_hash=CODE), agree)
        assert shown, repr(text)


@pytest.mark.parametrize(
    ("text", "env"),
    [
        (ATTACK, []),
        (JOB_FILE + "secrets: [TOKEN]\n", []),
        (JOB_FILE + "env: {TOKEN: null}\n", []),
        (JOB_FILE, ["TOKEN"]),
    ],
)
def test_a_job_file_of_a_host_gets_nothing_of_the_operators_shell(text: str, env: list[str]) -> None:
    wanted = load_requested_job(text, "job.yaml", [], env)
    with pytest.raises(errors.UsageError, match=r"takes variables of your shell \(.*TOKEN|AWS"):
        manifest_trust.refuse_shell(wanted.job, wanted.env, "digits-1@10")
    plain = load_requested_job(JOB_FILE + "env: {A: b}\n", "job.yaml", [], ["C=d"])
    manifest_trust.refuse_shell(plain.job, plain.env, "digits-1@10")


@pytest.mark.parametrize(
    "printed", [b"", b"[]", b'"x"', b"null", b'{"\xff": 1}', b"[" * 100_000, b'{"left": [{"pid": "x", "command": 3}]}']
)
def test_an_answer_of_another_form_is_refused_by_the_host_s_name(printed: bytes) -> None:
    shell = FakeShell("a")
    shell.on("python3", lambda *_: CommandResult(0, printed, b""))
    with pytest.raises(errors.CommandFailed, match="a: `host_state sweep` ended with 0: an unexpected answer"):
        run_program(shell, "python3", HOST_STATE, "sweep", {}, SWEPT)


@pytest.mark.parametrize("state", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": 1e999}x'])
def test_a_state_that_its_writer_damaged_is_refused_though_its_checksum_is_right(tmp_path: Path, state: bytes) -> None:
    manifest = Hostile(tmp_path).manifest
    folder = tmp_path / "made" / "digits-1" / "0000000010"
    (folder / "state.json").write_bytes(state)
    forged = msgspec.structs.replace(manifest, state=manifests.StateFile(len(state), manifests.checksum(state)))
    with pytest.raises(errors.CheckpointCorrupt, match=r"state.json is damaged"):
        read_state(folder, forged)


@pytest.mark.parametrize("body", [b'"format": 1, "a": "\xff"}', b'"a": ' + b"[" * 100_000])
def test_a_manifest_that_no_decoder_reads_is_refused_though_its_checksum_is_right(body: bytes) -> None:
    data = b'{"checksum":"' + manifests.checksum(body).encode() + b'",\n' + body
    with pytest.raises(errors.CheckpointCorrupt, match="is damaged"):
        manifests.decode(data, "checkpoint")


@pytest.mark.parametrize("printed", [b"x", b"[1, 2]", b'["a"]', b'["a", null]', b'{"\xff": 1}'])
def test_a_line_of_a_log_in_another_form_is_refused_by_the_host_s_name(printed: bytes) -> None:
    shell = FakeShell("a")
    shell.on("python3", lambda *_: CommandResult(0, printed + b"\n", b""))
    with pytest.raises(errors.CommandFailed, match="a: `host_state logs` ended with 0: an unexpected answer"):
        job_logs.read_lines(shell, host("a", "/w"), {})
