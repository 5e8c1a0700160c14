"""The page for Prometheus, read back by its own parser."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from psctl.errors import PortTaken
from psctl.export.prometheus_export import PrometheusExport
from psctl.job import events
from psctl.types import Address
from tests.export.test_metric_records import PROGRESS


@pytest.fixture
def address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


def page(address: Address) -> dict[tuple[str, str], float]:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, ",".join(value for key, value in sorted(sample.labels.items()) if key != "job")): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_page_has_the_present_numbers_and_ends_with_the_export(address: Address) -> None:
    export = PrometheusExport(address, "digits-1")
    assert str(address) in export.place
    export.write(PROGRESS)
    export.write(events.StateChanged(time=1.0, role="worker", rank=0, host='h"\n', state="running", step=9))
    found = page(address)
    assert found["psctl_step", ""] == 10
    assert found["psctl_metric", "loss"] == 0.5
    assert found["psctl_rank_step", "h__,0,worker"] == 9
    assert found["psctl_losses_total", "worker"] == 0
    export.close()
    with pytest.raises(OSError, match="refused"):
        page(address)


def test_a_port_that_is_taken_is_said(address: Address) -> None:
    export = PrometheusExport(address, "digits-1")
    with pytest.raises(PortTaken, match=f"another process listens on {address}"):
        PrometheusExport(address, "digits-2")
    export.close()
