"""Answers of a host to queries about its checkpoints."""

from __future__ import annotations

import json

import pytest

from psctl.checkpoint.tool import main


@pytest.fixture
def ask(capsys):
    def asked(verb, **question):
        status = main([verb, json.dumps(question)])
        return status, json.loads(capsys.readouterr().out)

    return asked


def test_a_host_lists_shows_and_verifies_its_checkpoints(save, ask, tmp_path):
    folder, _ = save(tmp_path)
    status, answer = ask("list", root=str(tmp_path), job="digits-3")
    assert (status, [row["id"] for row in answer["checkpoints"]]) == (0, ["digits-3@500"])
    _, shown = ask("show", root=str(tmp_path), job="digits-3", which="latest")
    assert shown == {"step": 500}
    _, verified = ask("verify", folder=str(folder))
    assert (verified["id"], verified["verified"], verified["problems"]) == ("digits-3@500", True, [])


def test_damage_is_reported_and_not_exported(save, ask, tmp_path):
    folder, _ = save(tmp_path)
    (folder / "state.json").unlink()
    _, verified = ask("verify", root=str(tmp_path), job="digits-3", which="500")
    assert (verified["verified"], verified["complete"]) == (False, False)
    assert verified["problems"] == ["state.json is missing"]
    status, answer = ask("export", folder=str(folder), out=str(tmp_path / "out.safetensors"))
    assert (status, answer["error"]["code"], answer["error"]["exit"]) == (1, "checkpoint-incomplete", 9)
    assert not (tmp_path / "out.safetensors").exists()


def test_the_newest_correct_checkpoint_is_named_with_the_skipped_ones(save, ask, tmp_path):
    save(tmp_path, step=100)
    torn, _ = save(tmp_path, step=200)
    (torn / "manifest.json").unlink()
    _, answer = ask("newest", root=str(tmp_path), job="digits-3")
    assert answer["step"] == 100
    assert answer["skipped"][0].startswith("digits-3@200 skipped: it has no manifest.json")
    assert ask("newest", root=str(tmp_path), job="other-1")[1] == {"step": None, "skipped": []}


def test_old_checkpoints_are_pruned_and_copied_ones_adopted(save, ask, tmp_path):
    save(tmp_path, step=100)
    folder, _ = save(tmp_path, step=200)
    _, answer = ask("prune", root=str(tmp_path), job="digits-3", keep=1)
    assert [row["step"] for row in answer["removed"]] == [100]
    partial = folder.with_name("0000000200.brought.partial")
    folder.rename(partial)
    status, answer = ask("adopt", partial=str(partial), folder=str(folder))
    assert (status, answer) == (0, {"folder": str(folder)})
    assert [path.name for path in folder.parent.iterdir()] == ["0000000200"]


def test_a_missing_step_returns_an_error_document(ask, tmp_path):
    status, answer = ask("show", root=str(tmp_path), job="digits-3", which="7")
    assert (status, answer["error"]["code"]) == (1, "no-such-checkpoint")
