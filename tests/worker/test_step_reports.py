"""A report's bytes by peer: the busiest peers one by one, the others as one sum; each byte is reported once."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from psctl.job.training_messages import MOST_PEERS, WorkerReport
from psctl.types import PeerBytes
from psctl.worker.step_reports import ReportInterval


def test_many_peers_are_a_bounded_report_of_all_bytes() -> None:
    peers = {f"server/{n}": PeerBytes(10 * n, n) for n in range(1000)}
    sync = SimpleNamespace(bytes_by_peer=dict(peers), sync_seconds=0.0, in_flight_seconds=0.0, staleness=0)
    interval = ReportInterval(sync, SimpleNamespace(now=lambda: 0.0))
    sync.bytes_by_peer = {
        name: PeerBytes(sent + 10 * n, received + n) for n, (name, (sent, received)) in enumerate(peers.items())
    }
    moved = interval._newly_moved()
    assert len(moved) == MOST_PEERS + 1
    assert [name for name, _, _ in moved[:2]] == ["server/999", "server/998"]
    assert moved[-1][0] == ""
    assert sum(sent for _, sent, _ in moved) == sum(10 * n for n in range(1000))
    assert sum(received for _, _, received in moved) == sum(range(1000))
    assert interval._newly_moved() == ()
    report = WorkerReport(1, 0, [], 1.0, 0.1, 0.1, moved)
    assert msgspec.convert(msgspec.to_builtins(report), WorkerReport) == report, "its bound on the wire"
