"""Checkpoints at a URL: listed, verified and pulled without a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from psctl import errors
from psctl.checkpoint.reader import verify
from psctl.checkpoint.upload import CheckpointTarget
from psctl.launch.checkpoints import target_actions
from psctl.launch.home import Home
from tests.launch.test_carrying import save

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
