"""Checkpoints at a URL: listed, shown, verified, pulled, exported, pruned without a host, and sent to one."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from psctl import errors
from psctl.checkpoint.reader import verify
from psctl.checkpoint.upload import CheckpointTarget
from psctl.launch.checkpoints import target_actions
from psctl.launch.home import Home, HostRecord
from psctl.remote.local import LocalShell
from psctl.spec.noted_options import with_notes
from psctl.transport.protocol.authority import make_authority
from tests.launch.test_carrying import ROOT, record, save

pytest.importorskip("fsspec")


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"file://{tmp_path}/shelf"
    for step, accuracy in ((10, 0.9), (20, 0.8)):
        CheckpointTarget(found).upload(save(tmp_path / "w", step, accuracy))
    return found


def test_a_list_is_of_the_whole_url_or_of_one_job(url: str) -> None:
    rows = target_actions.list_at(url)
    assert [(row["id"], row["folder"]) for row in rows] == [
        ("digits-1@10", f"{url}/digits-1/0000000010"), ("digits-1@20", f"{url}/digits-1/0000000020"),
    ]  # fmt: skip
    assert target_actions.list_at(f"{url}/digits-1") == rows
    assert target_actions.list_at(f"{url}/other-1") == []


def test_one_is_pulled_by_its_name_and_a_damaged_one_is_refused(url: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    folder, size = target_actions.pull_from(home, f"{url}/digits-1@latest", tmp_path / "mine")
    assert folder == tmp_path / "mine" / "digits-1@20"
    assert (verify(folder), size > 0) == ([], True)
    with pytest.raises(errors.UsageError, match="exists already"):
        target_actions.pull_from(home, f"{url}/digits-1@20", tmp_path / "mine")
    with pytest.raises(errors.NoSuchCheckpoint, match="there are steps: 10, 20"):
        target_actions.pull_from(home, f"{url}/digits-1@7", tmp_path / "mine")
    assert target_actions.verify_at(home, f"{url}/digits-1@10")["problems"] == []
    victim = next((tmp_path / "shelf/digits-1/0000000010").glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert victim.name in target_actions.verify_at(home, f"{url}/digits-1@10")["problems"][0]
    with pytest.raises(errors.CheckpointCorrupt, match=victim.name):
        target_actions.pull_from(home, f"{url}/digits-1@10", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["digits-1@20"]


def test_one_is_shown_and_exported(url: str, tmp_path: Path) -> None:
    found = target_actions.find(Home(tmp_path / "home"), f"{url}/digits-1@10")
    brief = found.brief
    assert (brief["id"], brief["folder"]) == ("digits-1@10", f"{url}/digits-1/0000000010")
    assert brief["tensors"] == [{"name": "param/w", "dtype": "float32", "shape": [4]}]
    assert (brief["signed"], found.reference) == ("none", f"{url}/digits-1@10")
    out = tmp_path / "new" / "model.safetensors"
    assert target_actions.export(found, out) == out.stat().st_size
    with safe_open(out, "np") as model:
        assert model.get_tensor("w").tobytes() == bytes(range(16))
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]


def test_a_manifest_of_another_checkpoint_is_refused(url: str, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf/digits-1"
    (shelf / "0000000020").rename(shelf / "0000000030")
    with pytest.raises(errors.CheckpointCorrupt, match="its manifest is that of digits-1@20"):
        target_actions.find(Home(tmp_path / "home"), f"{url}/digits-1@latest")


def test_pruning_keeps_the_newest_the_best_and_unfinished_uploads(url: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    for step, accuracy in ((30, 0.7), (40, 0.6)):
        CheckpointTarget(url).upload(save(tmp_path / "w", step, accuracy))
    unfinished = tmp_path / "shelf/digits-1/0000000015"
    unfinished.mkdir()
    (unfinished / "state.json").write_text("{}")
    plan = target_actions.to_prune(home, f"{url}/digits-1", 1)
    assert CheckpointTarget(url).steps("digits-1") == [10, 20, 30, 40]
    assert [row["id"] for row in plan.document["checkpoints"]] == ["digits-1@20", "digits-1@30"]
    assert [row["id"] for row in plan.document["kept"]] == ["digits-1@10", "digits-1@40"], "accuracy is to be high"
    plan.act()
    assert CheckpointTarget(url).steps("digits-1") == [10, 40]
    assert sorted(path.name for path in unfinished.parent.iterdir()) == ["0000000010", "0000000015", "0000000040"]
    assert target_actions.find(home, f"{url}/digits-1@best").step == 10
    with pytest.raises(errors.NoSuchCheckpoint, match="no checkpoints of other-1"):
        target_actions.to_prune(home, f"{url}/other-1", 1)


def test_one_is_sent_to_a_host_that_lacks_it(url: str, tmp_path: Path) -> None:
    found = target_actions.find(Home(tmp_path / "home"), f"{url}/digits-1@20")
    host = HostRecord("here", str(tmp_path / "new"), str(tmp_path / "new/jobs/x"), sys.executable, str(ROOT))
    shell = LocalShell("here", str(tmp_path))
    try:
        folder = Path(target_actions.bring(found, shell, host))
        assert (folder, verify(folder)) == (tmp_path / "new/checkpoints/digits-1/0000000020", [])
        assert [path.name for path in folder.parent.iterdir()] == ["0000000020"], "nothing partial is left"
        victim = next((tmp_path / "shelf/digits-1/0000000020").glob("*.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1] + b"?")
        assert target_actions.bring(found, shell, host) == str(folder), "the copy there is used"
        elsewhere = HostRecord("here", str(tmp_path / "other"), "/", sys.executable, str(ROOT))
        with pytest.raises(errors.CheckpointCorrupt, match=victim.name):
            target_actions.bring(found, shell, elsewhere)
        assert not (tmp_path / "other").exists()
    finally:
        shell.close()


def test_the_signature_is_compared_with_the_record_of_the_job(url: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    authority = make_authority("digits-1", 1e9).certificate_pem
    home.save_record(msgspec.structs.replace(record(tmp_path / "w"), authority=authority))
    with pytest.raises(errors.CheckpointCorrupt, match="is not signed, expected: by the authority of digits-1"):
        target_actions.find(home, f"{url}/digits-1@20")


def test_options_of_the_command_line_count_for_what_is_kept(url: str, tmp_path: Path) -> None:
    home, job = Home(tmp_path / "home"), record(tmp_path / "w")
    assert [row.step for row in target_actions.to_prune(home, f"{url}/digits-1", 1).removed] == []
    noted = with_notes(job.job_file, ["checkpoint.keep_best=null"], [])
    home.save_record(msgspec.structs.replace(job, job_file=noted))
    assert [row.step for row in target_actions.to_prune(home, f"{url}/digits-1", 1).removed] == [10]
