"""A page for Prometheus (OpenMetrics) on the head, made by its own library from the present numbers of the job."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from psctl.errors import PortTaken
from psctl.export.job_gauges import JobGauges
from psctl.job import events
from psctl.types import Address


class PrometheusExport(Collector):
    """Serves the numbers of one job at http://ADDRESS/metrics.

    Args:
        address: where it listens.
        job: the job's name, a label of every number.

    Raises:
        PortTaken: another process listens there.
        OSError: the address is none of this host.
    """

    def __init__(self, address: Address, job: str) -> None:
        self._job, self._gauges, self._lock = job, JobGauges(), threading.Lock()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._service, self._thread = start_http_server(address.port, address.host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken(
                f"another process listens on {address}", "another port: `metrics: {prometheus: PORT}`"
            ) from error
        self.place = f"for Prometheus at http://{address}/metrics on the head"

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the present numbers; called by the library at each request."""
        with self._lock:
            found = self._gauges.gauges(time.time())
        for each in found:
            kind = CounterMetricFamily if each.counts else GaugeMetricFamily
            family = kind(each.name, each.help, labels=("job", *each.labels))
            for sample in each.samples:
                family.add_metric((self._job, *sample.labels), sample.value)
            yield family

    def write(self, event: events.AnyEvent) -> None:
        """Take the numbers of an event."""
        with self._lock:
            self._gauges.apply(event)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """End the service."""
        self._service.shutdown()
        self._service.server_close()
        self._thread.join()
