"""A report's bytes by peer: the busiest peers one by one, the others as one sum; each byte is reported once."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from psctl.job.training_messages import MOST_PEERS, WorkerReport
from psctl.types import PeerBytes
from psctl.worker.step_reports import ReportInterval, StepReports


def test_many_peers_are_a_bounded_report_of_all_bytes() -> None:
    before = {f"server/{n}": PeerBytes(10 * n, n) for n in range(1000)}
    sync = SimpleNamespace(bytes_by_peer=before, sync_seconds=0.0, in_flight_seconds=0.0, staleness=0)
    progress = SimpleNamespace(examples=0.0, last_boundary=1, step=1, epoch=0, total=2)
    interval, sent = ReportInterval(sync, SimpleNamespace(now=lambda: 0.0)), []
    sync.bytes_by_peer = {name: PeerBytes(2 * each.sent, 2 * each.received) for name, each in before.items()}
    for _ in range(2):
        interval.send_report(sent.append, progress, StepReports())
    moved = sent[0].moved
    assert len(moved) == MOST_PEERS + 1
    assert [name for name, _, _ in moved[:2]] == ["server/999", "server/998"]
    assert moved[-1][0] == ""
    assert sum(out for _, out, _ in moved) == sum(10 * n for n in range(1000))
    assert sum(back for _, _, back in moved) == sum(range(1000))
    assert sent[1].moved == ()
    assert msgspec.convert(msgspec.to_builtins(sent[0]), WorkerReport) == sent[0], "its bound on the wire"
