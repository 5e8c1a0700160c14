"""What a job's script wrote, at the end of the job: fetched where `outputs:` asks for it, else said where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from psctl import errors
from psctl.cli.shared.context import Context
from psctl.launch.agent_calls import digest
from psctl.launch.files import output_pull
from psctl.launch.home import JobRecord
from psctl.launch.hosts.converge import verdict
from psctl.remote.fleet import Fleet
from psctl.spec.noted_options import load_noted
from psctl.types import HostName, JsonObject
from psctl.units import format_bytes


class JobOutputs(msgspec.Struct, frozen=True):
    """The files of a job at its end: `document` for programs, `text` for people; `error` where some did not come."""

    document: JsonObject
    text: str
    error: errors.PsctlError | None = None


def patterns_of(record: JobRecord) -> tuple[str, ...]:
    """Return the `outputs:` of a job's file."""
    job = load_noted(record.job_file, record.job_source)
    return job.outputs


def with_ranks(fleet: Fleet, record: JobRecord) -> JobRecord:
    """Return the record with the ranks that a running job's head knows, where that is reached."""
    head = fleet.shells.get(HostName(record.head.name))
    if record.over or head is None:
        return record
    with contextlib.suppress(errors.PsctlError):  # the job has just ended: its hosts name the folders then
        return msgspec.structs.replace(record, ranks=list(digest(head, record.head).ranks.values()))
    return record


def fetch(
    context: Context, record: JobRecord, fleet: Fleet | None, show: Callable[[str], object] | None
) -> JobOutputs | None:
    """Fetch a job's outputs to this machine, or say where the files are that its script wrote.

    Args:
        context, record: the call and the job.
        fleet: open connections, which are used where they lead to all hosts.
        show: called with the progress; None: the bar of transfers shows it.

    Returns:
        the files; None where the script wrote none that are known here.
    """
    patterns = patterns_of(record)
    with contextlib.ExitStack() as stack:
        names = [host.name for host in record.hosts]
        if patterns and (fleet is None or any(name not in fleet.shells for name in names)):
            fleet = stack.enter_context(context.connect(context.cluster_of(record), names))
        if fleet is None:
            return None
        if not patterns:
            return _where(record, fleet)
        to = make_folder(record)
        pulled, failed = output_pull.pull(context.home, fleet, record, patterns, to, _counter(show))
    error = verdict(failed, len(names), "fetched")
    text = pulled.summary if error is None else f"{pulled.summary}; {error.message}: psctl pull {record.job}"
    return JobOutputs(msgspec.to_builtins(pulled), text, error)


def make_folder(record: JobRecord) -> Path:
    """Return the folder that a job's outputs come to by default, whose content is not sent with the job's folder."""
    to = output_pull.folder_for(record)
    if not to.parent.exists():
        to.parent.mkdir()
        (to.parent / ".gitignore").write_text(output_pull.MARK)
    return to


def _counter(show: Callable[[str], object] | None) -> Callable[[int], object] | None:
    """Return what counts bytes and shows how many have come."""
    if show is None:
        return None
    came = shown = 0

    def count(size: int) -> None:
        nonlocal came, shown
        came += size
        if came - shown >= 1 << 20:
            shown = came
            show(f"fetching the job's outputs: {format_bytes(came)}")

    return count


def _where(record: JobRecord, fleet: Fleet) -> JobOutputs | None:
    """Return on which of the connected hosts the files are that the script wrote."""
    files, _ = output_pull.list_outputs(fleet, record)
    holders = [host for host in record.hosts if any(file.host == host.name for file in files)]
    if not holders:
        return None
    size = sum(file.size for file in files)
    where = ", ".join(f"{host.name}:{host.files}" for host in holders)
    rows: list[JsonObject] = [{"name": host.name, "folder": host.files} for host in holders]
    count = f"{len(files)} file{'s' if len(files) > 1 else ''} ({format_bytes(size)})"
    return JobOutputs(
        {"job": record.job, "to": None, "files": len(files), "bytes": size, "hosts": rows},
        f"{count} in {where}   psctl pull {record.job}",
    )
