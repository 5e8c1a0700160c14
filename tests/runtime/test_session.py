"""What a worker's session does when the coordinator goes."""

from __future__ import annotations

import json

from psctl.errors import ConnectionFailed
from psctl.runtime import private_memory
from psctl.runtime import session as sessions
from psctl.runtime.session import Session
from psctl.words import Member


def test_a_worker_that_loses_the_coordinator_tells_its_agent_that_it_was_a_connection(monkeypatch, tmp_path) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sessions.os, "_exit", ends.append)
    with private_memory.holding(json.dumps({"error_file": str(tmp_path / "error.json")}).encode()) as orders:
        monkeypatch.setenv("PSCTL_ORDERS", f"{tmp_path}/worker-1:{orders}")
        Session(Member("worker", 1)).lost(None, ConnectionFailed("no word for 5 s"))
    found = json.loads((tmp_path / "error.json").read_text())
    assert (ends, found["code"]) == ([1], "connection-failed")
    assert found["exception"] == "ConnectionFailed: the connection to the coordinator is lost: no word for 5 s"
