"""The process that exports metrics: each program has a thread, which reads the event log by itself.

    python -m psctl.export.main        orders: in memory (sealed_memory.py)

Nothing in the job waits for this process. What a program cannot get is said once, in a notice of the event log.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from psctl.errors import PsctlError
from psctl.export.log_reader import LOOK, read_events
from psctl.job import events
from psctl.process import sealed_memory, stderr_log
from psctl.process.process_orders import ExporterOrders
from psctl.types import UNDECODABLE

NICE = 5
"""Added to the process's niceness: workers go first."""

LONGEST_ERROR = 240
"""Characters of a library's error that are repeated."""

AGAIN = 60.0
"""Seconds after which a server that did not answer is tried again."""

LAST = 1 << 18
"""Bytes of a log's end that hold its last event."""


class MetricsExport(Protocol):
    """One program that gets the metrics; `place` says where they are, for people."""

    place: str

    def write(self, event: events.AnyEvent) -> None:
        """Take an event."""

    def flush(self) -> None:
        """Bring everything taken so far to its place."""

    def close(self) -> None:
        """End."""


class ExportStart(msgspec.Struct, frozen=True):
    """What starts the export to one program, which imports its library.

    `again`: seconds after a failure until it is started again, with the whole log; 0: never.
    """

    package: str
    start: Callable[[], MetricsExport]
    again: float = 0.0


def exports_of(orders: ExporterOrders) -> dict[str, ExportStart]:
    """Return what starts each export that is wanted, by its key under `metrics`."""
    wanted = orders.exports
    found: dict[str, ExportStart] = {}

    if (folder := wanted.tensorboard) is not None:

        def tensorboard() -> MetricsExport:
            from psctl.export.tensorboard_export import TensorboardExport

            own = Path(folder).expanduser() / orders.job if folder else Path(orders.folder) / "tensorboard"
            return TensorboardExport(own, orders.parameters)

        found["tensorboard"] = ExportStart("tensorboard", tensorboard)
    if (address := wanted.prometheus) is not None:

        def prometheus() -> MetricsExport:
            from psctl.export.prometheus_export import PrometheusExport

            return PrometheusExport(address, orders.job)

        found["prometheus"] = ExportStart("prometheus_client", prometheus)
    if (uri := wanted.mlflow) is not None:

        def mlflow() -> MetricsExport:
            from psctl.export.mlflow_export import MlflowExport

            return MlflowExport(uri, orders.job, orders.parameters)

        found["mlflow"] = ExportStart("mlflow-skinny", mlflow, AGAIN)
    if (project := wanted.wandb) is not None:

        def wandb() -> MetricsExport:
            from psctl.export.wandb_export import WandbExport

            return WandbExport(project, orders.job, Path(orders.folder), orders.parameters)

        found["wandb"] = ExportStart("wandb", wandb)
    return found


class Notices:
    """Sentences for the event log, which the agent reads from a pipe.

    Args:
        descriptor: the pipe.
        host: the name of this host.
    """

    def __init__(self, descriptor: int, host: str) -> None:
        self._descriptor, self._host, self._lock = descriptor, host, threading.Lock()

    def say(self, text: str) -> None:
        """Have a sentence written."""
        with self._lock:
            os.write(self._descriptor, " ".join(text.split()).encode(errors="replace")[:4000] + b"\n")

    def say_failed(self, key: str, package: str, error: BaseException, then: str = "") -> None:
        """Say why the metrics do not go to a program any more; `then`: words at the end."""
        if isinstance(error, ModuleNotFoundError):
            missing = (error.name or package).partition(".")[0]
            cure = f"add {package} to `runtime: {{requirements: [...]}}` in the cluster file, or install it there"
            why = f"needs the package {package}, and {self._host} has no module {missing}: {cure}"
        elif isinstance(error, PsctlError):
            why = f"{error.message}; {error.hint}" if error.hint else error.message
        elif isinstance(error, OSError):
            why = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        else:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            why = why if len(why) <= LONGEST_ERROR else f"{why[:LONGEST_ERROR]} ..."
        self.say(f"metrics: {key}: {why}; training goes on without it{then}")


def follow(log: Path, key: str, wanted: ExportStart, notices: Notices) -> None:
    """Pass the events of a log to one program until the job's end; a failure ends only this, or is tried again."""
    while True:
        was_over = is_over(log)
        try:
            export = wanted.start()
            notices.say(f"metrics are written {export.place}")
            for event in read_events(log):
                if event is None:
                    export.flush()
                else:
                    export.write(event)
            export.close()
            return
        except Exception as error:  # noqa: BLE001 - of any library: it is reported, and the other programs go on
            again = wanted.again > 0 and not was_over and not isinstance(error, ImportError)
            notices.say_failed(key, wanted.package, error, f"; tried again every {wanted.again:g} s" if again else "")
        if not again:
            return
        until = time.monotonic() + wanted.again
        while time.monotonic() < until and not is_over(log):
            time.sleep(LOOK)


def is_over(log: Path) -> bool:
    """Return whether the last event of a job is in its log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST))
        *_, line = file.read().splitlines() or [b""]
    try:
        return isinstance(events.from_line(line), events.Finished)
    except UNDECODABLE:
        return False


def export_all(log: Path, exports: Mapping[str, ExportStart], notices: Notices) -> None:
    """Pass the events of a log to all programs until the job's end."""
    threads = [
        threading.Thread(target=follow, args=(log, key, wanted, notices), name=key, daemon=True)
        for key, wanted in exports.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    """Export the metrics of the job that this process's orders name."""
    stderr_log.install()
    data = sealed_memory.read()
    assert data is not None, "an agent starts the exporter"
    orders = msgspec.json.decode(data, type=ExporterOrders)
    os.set_inheritable(orders.notices, False)
    os.nice(NICE)
    export_all(Path(orders.folder) / events.FILE, exports_of(orders), Notices(orders.notices, orders.host))
    return 0


if __name__ == "__main__":
    sys.exit(main())
