"""Checkpoints of torch.distributed.checkpoint and safetensors: exported, and loaded as start values, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from psctl import load_start_values
from psctl.checkpoint.manifest import Manifest
from psctl.checkpoint.reader import open_checkpoint
from psctl.checkpoint.writer import CheckpointWriter
from psctl.errors import UsageError
from psctl.train_state import dcp_calls
from psctl.train_state.dcp_export import export_dcp
from psctl.train_state.training_parts import TrainingParts
from psctl.types import TensorSlice

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
"""torch says so where it saves or loads in one process, as is meant here."""

Parts = tuple[nn.Module, torch.optim.Optimizer]

FACTS: dict[str, Any] = {
    "time": 1.0, "world": 1, "servers": 0, "strategy": "alone", "update": "worker", "seed": 0, "epoch": 0,
    "metrics": {}, "code_hash": "", "job_file": "",
}  # fmt: skip


class Net(nn.Module):
    """Two layers of different optimizer groups, a tied weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return out


def built(seed: int) -> Parts:
    torch.manual_seed(seed)
    net = Net()
    groups = [
        {"params": [*net.first.parameters()], "lr": 0.02 + seed / 1000},
        {"params": [*net.norm.parameters(), net.last.bias]},
    ]
    return net, torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def train(parts: Parts, steps: range) -> Parts:
    net, optimizer = parts
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()
    return parts


def bits(parts: Parts) -> dict[str, Any]:
    net, optimizer = parts
    found: dict[str, Any] = {name: one.clone() for name, one in net.state_dict().items()}
    whole = optimizer.state_dict()
    for index, state in whole["state"].items():
        found |= {f"{index}.{key}": value for key, value in state.items()}
    return found | {f"group {index}": group for index, group in enumerate(whole["param_groups"])}


def same(first: Parts, second: Parts) -> bool:
    left, right = bits(first), bits(second)
    return left.keys() == right.keys() and all(
        torch.equal(one, right[name]) if isinstance(one, torch.Tensor) else one == right[name]
        for name, one in left.items()
    )


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Parts], tuple[Path, Manifest]]:
    """Write a checkpoint of psctl of a model and its optimizer, as rank 0 does."""

    def write(parts: Parts) -> tuple[Path, Manifest]:
        whole = TrainingParts(*parts, None)
        plain, tensors = whole.optimizer_state()
        named = {**whole.values(on_servers=False), **tensors}
        state = {"groups": whole.groups(), "members": whole.group_members(), "tied": whole.tied(), "optimizer": plain}
        folder = tmp_path / "0000000007"
        writer = CheckpointWriter(folder, "net-1", 7)
        shapes = {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in named.items()}
        writer.open_file("worker/0", [TensorSlice(name, *shapes[name], 0, one.numel()) for name, one in named.items()])
        for index, one in enumerate(named.values()):
            writer.write_part("worker/0", index, 0, one.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        writer.finish_file("worker/0")
        return folder, writer.commit(state=state, **FACTS)

    return write


def _older(state: dict[str, Any], *, checkpoint_id: Any = None, storage_reader: Any = None) -> None:
    raise AssertionError("functions of older versions of torch do not take no_dist and wait for other processes")


@pytest.fixture(params=["torch", "torch 2.6"])
def exported(
    request: pytest.FixtureRequest, saved: Callable[[Parts], tuple[Path, Manifest]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Parts, Path]:  # fmt: skip
    if request.param == "torch 2.6":
        monkeypatch.setattr(dcp_calls, "save", _older)
        monkeypatch.setattr(dcp_calls, "load", _older)
    trained = train(built(1), range(5))
    folder, manifest = saved(trained)
    out = tmp_path / "dcp"
    assert export_dcp(folder, open_checkpoint(folder), out) == sum(each.stat().st_size for each in out.iterdir())
    assert manifest.step == 7
    return trained, out


def test_torch_loads_what_was_exported_and_trains_on_as_the_job_would(exported: tuple[Parts, Path]) -> None:
    trained, out = exported
    parts = built(2)
    model, optimizer = get_state_dict(*parts)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    dcp_calls.load_alone(state, out)
    set_state_dict(*parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["step"] == 7
    assert same(parts, trained)
    assert same(train(parts, range(5, 9)), train(trained, range(5, 9)))


def test_what_was_exported_comes_back(exported: tuple[Parts, Path]) -> None:
    trained, out = exported
    parts = built(2)
    assert load_start_values(out, *parts) == []
    assert same(parts, trained)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize(
    "wrap", [lambda state: state, lambda state: {"app": {"run": state}}], ids=["plain", "prefixed"]
)
def test_what_torch_saved_is_loaded_and_trains_on_as_it_would(
    tmp_path: Path, flat: bool, wrap: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    trained = train(built(1), range(5))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = dict(zip(("model", "optim"), get_state_dict(*trained, options=options), strict=True))
    dcp_calls.save_alone(wrap(state), tmp_path / "saved")
    parts = built(2)
    assert load_start_values(tmp_path / "saved", *parts) == []
    assert same(parts, trained)
    assert same(train(parts, range(5, 9)), train(trained, range(5, 9)))
    alone = built(3)
    load_start_values(tmp_path / "saved", alone[0])
    assert not alone[1].state


def test_nothing_is_changed_where_a_folder_does_not_fit(exported: tuple[Parts, Path], tmp_path: Path) -> None:
    _, out = exported
    other = nn.Sequential(nn.Linear(6, 6))
    with pytest.raises(UsageError, match=r"has no 0\.weight, 0\.bias; it has "):
        load_start_values(out, other)
    wide = built(4)
    wide[0].norm = nn.BatchNorm1d(7)
    before = bits(wide)
    with pytest.raises(UsageError, match=r"norm\.weight has shape \(6,\) in .*, and \(7,\) in this model"):
        load_start_values(out, *wide)
    assert all(torch.equal(one, bits(wide)[name]) for name, one in before.items() if isinstance(one, torch.Tensor))
    dcp_calls.save_alone({"model": built(1)[0].state_dict()}, tmp_path / "no optimizer")
    with pytest.raises(UsageError, match="no state of this model's optimizer"):
        load_start_values(tmp_path / "no optimizer", *built(2))
    with pytest.raises(UsageError, match="exists already"):
        export_dcp(tmp_path, open_checkpoint(tmp_path / "0000000007"), out)


def test_a_checkpoint_that_lacks_the_members_of_groups_is_refused(
    saved: Callable[[Parts], tuple[Path, Manifest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingParts, "group_members", lambda _: [])  # as an earlier psctl wrote it
    folder, manifest = saved(built(1))
    with pytest.raises(UsageError, match="does not say which parameters are in which group"):
        export_dcp(folder, manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_safetensors_of_one_or_several_files_are_loaded(tmp_path: Path) -> None:
    net, other = built(1)[0], built(2)[0]
    tensors = {f"model.{name}": one.clone() for name, one in net.state_dict().items() if name != "last.weight"}
    tensors["model.unused"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_start_values(tmp_path, other) == ["model.unused"]
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in net.state_dict().items())

    names, sharded, other = sorted(tensors), tmp_path / "sharded", built(3)[0]
    sharded.mkdir()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in names if files[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    load_start_values(sharded, other)
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in net.state_dict().items())


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no model"):
        load_start_values(tmp_path / "missing", built(1)[0])
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(UsageError, match=r"model\.safetensors is no file of safetensors"):
        load_start_values(tmp_path, built(1)[0])
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UsageError, match="is no index of safetensors"):
        load_start_values(tmp_path, built(1)[0])
    with pytest.raises(UsageError, match="holds no optimizer"):
        load_start_values(tmp_path, *built(1))
