"""A model of transformers goes through psctl's checkpoints to other libraries' files and back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.running import Ended, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.soak]

SCRIPT = Path(__file__).parent / "scripts" / "hf_model.py"


def losses(run: Ended) -> list[str]:
    assert run.code == 0, run
    return [each["text"] for each in run.of("log") if each["text"].startswith("loss ")]


@pytest.mark.timeout(1200)
def test_from_pretrained_reads_an_export_and_a_job_continues_from_dcp(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    psctl, folder, place = Psctl(tmp_path), tmp_path / "job", tmp_path / "exported"
    folder.mkdir()
    shutil.copy(SCRIPT, folder / "train.py")
    (folder / "job.yaml").write_text("version: 1\nname: tiny\nscript: train.py\nworkers: 1\ntimeouts: {start: 5m}\n")

    def train(**variables: str) -> list[str]:
        given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
        words = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
        return losses(psctl.run("train", str(folder / "job.yaml"), "-o", "jsonl", *words, timeout=500))

    whole = train(EPOCHS="4")
    half = train(EPOCHS="2", CONFIG=str(place))
    assert half == whole[: len(half)]
    for out, options in (("model.safetensors", []), ("dcp", ["--format", "dcp"])):
        done = psctl.run("checkpoint", "export", "tiny-2@latest", str(place / out), *options, "-o", "json")
        assert done.code == 0, done
        assert done.document["bytes"] > 0
    again = psctl.run("checkpoint", "export", "tiny-2@latest", str(place / "dcp"), "--format", "dcp")
    assert (again.code, "exists already" in again.err) == (2, True), again

    model, info = transformers.GPT2LMHeadModel.from_pretrained(place, output_loading_info=True)
    assert not any(info.values()), info
    ids = (torch.arange(8) + torch.arange(8).unsqueeze(1)) % 11
    assert f"loss {model(input_ids=ids, labels=ids).loss.item():.7e}" == train(EPOCHS="1", START=str(place))[0]

    assert train(EPOCHS="2", START=str(place / "dcp")) == whole[len(half) :], "as if it had not stopped, to the digit"
