"""What a worker's session does when the coordinator goes."""

from __future__ import annotations

import json

from psctl.errors import ConnectionFailed
from psctl.process import sealed_memory
from psctl.types import Member
from psctl.worker import coordinator_session as sessions
from psctl.worker.coordinator_session import CoordinatorSession


def test_a_worker_that_loses_the_coordinator_reports_a_connection_loss_to_its_agent(monkeypatch, tmp_path) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sessions.os, "_exit", ends.append)
    with sealed_memory.holding(json.dumps({"error_file": str(tmp_path / "error.json")}).encode()) as orders:
        monkeypatch.setenv("PSCTL_ORDERS", f"{tmp_path}/worker-1:{orders}")
        CoordinatorSession(Member("worker", 1)).on_connection_lost(None, ConnectionFailed("no word for 5 s"))
    found = json.loads((tmp_path / "error.json").read_text())
    assert (ends, found["code"]) == ([1], "connection-failed")
    assert found["exception"] == "ConnectionFailed: the connection to the coordinator is lost: no word for 5 s"
