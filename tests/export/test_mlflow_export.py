"""A run in MLflow. Its library is large: a fake has the signatures of 3.17, and is compared with it where it is."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from psctl.job import events
from tests.export.test_metric_records import PROGRESS, finished
from tests.export.test_tensorboard_export import PLANNED

STARTED = events.Started(time=1.0, job="digits-3", hosts=["h0", "h1"], roles=[])


class FakeMetric:
    """A number at a step; milliseconds."""

    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
        self.row = (key, value, timestamp, step)


class FakeParam:
    """A parameter."""

    def __init__(self, key: str, value: str) -> None:
        self.row = (key, value)


RUNS: list[dict[str, Any]] = []


class FakeClient:
    """A tracking server in memory."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        self.uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return None if name == "digits" and not RUNS else SimpleNamespace(experiment_id=name)

    def create_experiment(self, name: str) -> str:
        return name

    def search_runs(self, experiment_ids: list[str], filter_string: str = "") -> list[SimpleNamespace]:
        mine = [each for each in RUNS if all(f"'{each['tags'][key]}'" in filter_string for key in each["tags"] if
                                             key != "psctl.hosts")]  # fmt: skip
        return [
            SimpleNamespace(
                info=SimpleNamespace(run_id=str(RUNS.index(each))), data=SimpleNamespace(params=each["params"])
            )
            for each in mine
        ]

    def create_run(
        self,
        experiment_id: str,
        start_time: int | None = None,
        tags: dict[str, Any] | None = None,
        run_name: str | None = None,
    ) -> SimpleNamespace:
        RUNS.append({"experiment": experiment_id, "start": start_time, "tags": tags, "name": run_name, "params": {},
                     "metrics": [], "end": None})  # fmt: skip
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(RUNS) - 1)))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        RUNS[int(run_id)]["metrics"] += [each.row for each in metrics]
        for each in params:
            assert each.row[0] not in RUNS[int(run_id)]["params"]
            RUNS[int(run_id)]["params"].update([each.row])

    def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
        RUNS[int(run_id)]["end"] = (status, end_time)


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> Any:
    RUNS.clear()
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric, entities.Param, tracking.MlflowClient = FakeMetric, FakeParam, FakeClient  # type: ignore[attr-defined]
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "psctl.export.mlflow_export", raising=False)
    from psctl.export.mlflow_export import MlflowExport

    yield MlflowExport
    sys.modules.pop("psctl.export.mlflow_export", None)


def test_a_run_has_parameters_numbers_tags_and_a_status(export: Any) -> None:
    made = export("https://m", "digits-3", {"seed": 7, "strategy": "auto", "workers": 2})
    for event in (STARTED, PLANNED, PROGRESS, finished(accuracy=0.9)):
        made.write(event)
    made.close()
    (run,) = RUNS
    assert (run["experiment"], run["name"], run["start"]) == ("digits", "digits-3", 1000)
    assert run["end"] == ("FINISHED", 9000)
    assert run["tags"] == {"psctl.job": "digits-3", "psctl.started": "1.0", "psctl.hosts": "h0, h1"}
    assert run["params"] == {"seed": "7", "strategy": "ring", "workers": "3"}
    assert ("loss", 0.5, 5000, 10) in run["metrics"]
    assert ("accuracy", 0.9, 9000, 12) in run["metrics"]


def test_another_host_continues_the_run(export: Any) -> None:
    for _ in range(2):
        made = export("https://m", "digits-3", {"seed": 7})
        for event in (STARTED, PLANNED, PROGRESS):
            made.write(event)
        made.flush()
    assert len(RUNS) == 1


def test_a_stopped_job_is_killed_and_its_parameters_are_there_without_a_plan(export: Any) -> None:
    made = export("https://m", "digits-3", {"seed": 7})
    made.write(STARTED)
    made.write(events.Finished(time=2.0, status="stopped", exit=4, steps=0, seconds=1.0, metrics={}))
    assert (RUNS[0]["end"], RUNS[0]["params"]) == (("KILLED", 2000), {"seed": "7"})


@pytest.mark.filterwarnings("ignore")  # of the library's own imports
def test_the_fake_has_the_signatures_of_the_library_and_a_database_is_read_back(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    entities = pytest.importorskip("mlflow.entities")
    pairs = [(getattr(tracking.MlflowClient, name), each) for name, each in vars(FakeClient).items() if name[0] != "_"]
    for real, fake in [*pairs, (entities.Metric, FakeMetric), (entities.Param, FakeParam)]:
        known = list(inspect.signature(real).parameters)
        asked = list(inspect.signature(fake).parameters)
        assert [name for name in known if name in asked] == asked, fake
    pytest.importorskip("sqlalchemy")
    from psctl.export.mlflow_export import MlflowExport

    uri = f"sqlite:///{tmp_path}/m.db"
    made = MlflowExport(uri, "digits-3", {"seed": 7})
    for event in (STARTED, PLANNED, PROGRESS, finished(accuracy=0.9)):
        made.write(event)
    client = tracking.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_name, run.info.status) == ("digits-3", "FINISHED")
    assert (run.data.params["seed"], run.data.metrics["accuracy"]) == ("7", 0.9)
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")] == [(10, 0.5)]
