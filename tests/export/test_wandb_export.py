"""A run in Weights & Biases. A fake has the signatures of 0.31: the library is large, and used where it is."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from psctl.job import events
from tests.export.test_metric_records import PROGRESS, finished
from tests.export.test_mlflow_export import STARTED
from tests.export.test_tensorboard_export import PLANNED

CALLS: list[tuple[str, Any]] = []


class FakeConfig:
    """The configuration of a run."""

    def update(self, d: dict[str, Any], allow_val_change: bool | None = None) -> None:
        CALLS.append(("config", d))


class FakeRun:
    """A run in memory."""

    config = FakeConfig()

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        CALLS.append(("define", (name, step_metric)))

    def log(self, data: dict[str, Any]) -> None:
        CALLS.append(("log", data))

    def finish(self, exit_code: int | None = None) -> None:
        CALLS.append(("finish", exit_code))


def fake_init(
    entity: Any = None, project: Any = None, dir: Any = None, id: Any = None, name: Any = None, config: Any = None,
    mode: Any = None, resume: Any = None, settings: Any = None,
) -> FakeRun:  # fmt: skip
    CALLS.append(("init", (entity, project, dir, id, name, config, mode, resume)))
    return FakeRun()


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> Any:
    CALLS.clear()
    module = ModuleType("wandb")
    module.init, module.Settings, module.Run = fake_init, lambda **_: None, FakeRun  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "psctl.export.wandb_export", raising=False)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    from psctl.export.wandb_export import WandbExport

    yield WandbExport
    sys.modules.pop("psctl.export.wandb_export", None)


def test_a_run_without_a_key_is_offline_and_says_how_to_send_it(export: Any) -> None:
    made = export("team/vision", "digits-3", Path("/job"), {"seed": 7})
    for event in (STARTED, PLANNED, PROGRESS, finished(accuracy=0.9)):
        made.write(event)
    made.close()
    began = ("team", "vision", "/job", "digits-3-1", "digits-3", {"seed": 7}, "offline", "allow")
    assert CALLS[0] == ("init", began)
    assert ("config", {"strategy": "ring", "workers": 3}) in CALLS
    logged = [data for kind, data in CALLS if kind == "log"]
    assert [(each["psctl/step"], each.get("loss"), each.get("accuracy")) for each in logged] == [
        (10, 0.5, None), (12, None, 0.9),
    ]  # fmt: skip
    assert CALLS[-1] == ("finish", 0)
    assert made.place.endswith("wandb sync /job/wandb/offline-* sends it")


def test_with_a_key_the_client_decides(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    made = export("vision", "digits-3", Path("/job"), {})
    made.write(STARTED)
    assert CALLS[0][1][0] is None
    assert CALLS[0][1][-2:] == (None, "allow")
    assert made.place == "for Weights & Biases, project vision, run digits-3"


def test_events_before_the_first_one_are_left_out(export: Any) -> None:
    export("vision", "digits-3", Path("/job"), {}).write(events.Recovered(time=1.0))
    assert CALLS == []


@pytest.mark.filterwarnings("ignore")  # of the library's own imports
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the library is not installed")
def test_the_library_has_these_signatures_and_writes_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    pairs = [(wandb.init, fake_init), *((getattr(wandb.Run, name), getattr(FakeRun, name)) for name in
                                        ("define_metric", "log", "finish"))]  # fmt: skip
    for real, fake in pairs:
        assert set(inspect.signature(fake).parameters) <= set(inspect.signature(real).parameters), fake
    from psctl.export.wandb_export import WandbExport

    made = WandbExport("vision", "digits-3", tmp_path, {"seed": 7})
    for event in (STARTED, PLANNED, PROGRESS, finished(accuracy=0.9)):
        made.write(event)
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"psctl/step" in written.read_bytes()
