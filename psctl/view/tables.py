"""Results as tables: drawn at a terminal, tab-separated rows in a pipe. Each takes the document that `-o json` prints.

The text of a cell is made harmless, because much of it comes from other machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psctl.types import Document
from psctl.units import format_bytes, format_count, format_rate, format_seconds
from psctl.view.console import STATE_STYLES, say
from psctl.view.text import clock_time, date_time, number, one_line

LAST = 20
"""Least width of a table's last column; with less space rows become blocks."""

Cell = str | tuple[str, str]
"""Text, or text and its style."""


def draw_table(
    console: Console, heads: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[str] = ()
) -> None:
    """Draw a table.

    Args:
        heads: names of the columns; the last one may wrap.
        rows: cells, as many as heads.
        right: heads of the columns that hold numbers.
    """
    plain = [[_plain(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        say(console, "\t".join(heads), *("\t".join(text for text, _ in row) for row in plain))
        return
    widths = [max(cell_len(head), *(cell_len(row[i][0]) for row in plain), 1) for i, head in enumerate(heads)]
    if sum(widths[:-1]) + min(widths[-1], LAST) + 2 * len(heads) + 1 > console.width:
        _draw_records(console, heads, plain)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for head in heads[:-1]:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=True)
    table.add_column(heads[-1], justify="right" if heads[-1] in right else "left", overflow="fold")
    for row in plain:
        table.add_row(*(Text(text, style=style) for text, style in row))
    console.print(table)


def _draw_records(console: Console, heads: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Draw a table that is too wide for the terminal as one block a row, so that nothing is truncated."""
    width = max(map(len, heads))
    for (name, style), *rest in rows:
        console.print(Text(name, style=style or "bold"), soft_wrap=True)
        for head, (text, cell_style) in zip(heads[1:], rest, strict=True):
            console.print(Text.assemble((f"  {head:<{width}}  ", "dim"), (text, cell_style)), soft_wrap=True)


def _plain(cell: Cell) -> tuple[str, str]:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return one_line(text), style


def _state(state: object) -> Cell:
    return str(state), STATE_STYLES.get(str(state), "")


def _text(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def draw_up(console: Console, document: Document) -> None:
    """Draw the result of `up`: the actions on each host."""
    rows: list[list[Cell]] = []
    for host in document["hosts"]:
        error = host.get("error")
        what = _message(error) if error else "; ".join(host.get("actions", [])) or "nothing to do"
        rows.append([host["name"], _state(host["state"]), (what, "red" if error else "")])
    draw_table(console, ("host", "state", "actions"), rows)


def draw_clusters(console: Console, document: Document) -> None:
    """Draw the result of `clusters`, with the current one marked."""
    rows: list[list[Cell]] = []
    for each in document["clusters"]:
        mark: Cell = ("current", "bold") if each["current"] else ""
        what = {"changed": "its file was changed since: psctl up applies it", "new": "not made ready yet"}
        state = what.get(each["state"], each["state"].replace("-", " "))
        rows.append([each["name"], mark, str(len(each["hosts"])), state, _text(each["file"])])
    draw_table(console, ("cluster", "", "hosts", "state", "file"), rows, right=("hosts",))


def _message(error: object) -> str:
    """Return the text of an error, which is a string or {"message", "hint"} in documents."""
    if not isinstance(error, Mapping):
        return str(error)
    inner = error.get("error", error)
    hint = inner.get("hint")
    return f"{inner.get('message')}" + (f" ({hint})" if hint else "")


def draw_status(console: Console, document: Document) -> None:
    """Draw the result of `status`: jobs, the ranks of each, and the hosts."""
    draw_jobs(console, document)
    for job in document["jobs"]:
        if waits := job.get("recovering"):
            names, since, until = (
                one_line(", ".join(waits["hosts"])),
                clock_time(waits["since"]),
                clock_time(waits["until"]),
            )
            say(console, f"{job['job']} is recovering: it waits for {names} since {since}, until {until} at most")
        if job.get("encryption") == "off":
            say(
                console, f"{job['job']}: gradients and values are not encrypted between hosts (network.encryption: off)"
            )
        if (printed := job.get("printed")) and printed["text"].strip():
            moment, text = clock_time(printed["time"]), one_line(printed["text"])
            say(console, f"{job['job']}: {one_line(printed['rank'])} printed at {moment}: {text}")
    heads = ("rank", "host", "state", "step", "cpu", "memory", "pid", "last error")
    ranks = {str(job["job"]): [_rank(rank) for rank in job.get("ranks", [])] for job in document["jobs"]}
    if console.is_terminal:
        for job, rows in ranks.items():
            if rows:
                say(console, Text(one_line(job), style="bold"))
                draw_table(console, heads, rows, right=("step", "cpu", "memory", "pid"))
    elif any(ranks.values()):
        draw_table(console, ("job", *heads), [[job, *row] for job, rows in ranks.items() for row in rows])
    traffic = {name: rates for job in document["jobs"] for name, rates in (job.get("traffic") or {}).items()}
    hosts: list[list[Cell]] = [
        [
            host["name"], _state(host["state"]), _text(host["cores"]), _text(host["gpus"]),
            *(_moved(traffic.get(host["name"])) if traffic else ()), _labels(host), "; ".join(host["problems"]) or "-",
        ]
        for host in document.get("hosts", [])
    ]  # fmt: skip
    if hosts:
        moved = ("sends", "receives") if traffic else ()
        columns = ("host", "state", "cores", "gpus", *moved, "labels", "problems")
        draw_table(console, columns, hosts, right=("cores", "gpus", *moved))


def _moved(rates: Document | None) -> list[Cell]:
    return [format_rate(rates["sent"]), format_rate(rates["received"])] if rates is not None else ["-", "-"]


def _labels(host: Document) -> str:
    """Return a host's labels of the cluster file: "rack=r1 room=2"."""
    return " ".join(f"{name}={value}" for name, value in (host.get("labels") or {}).items()) or "-"


def _rank(rank: Document) -> list[Cell]:
    name = f"{rank['role']}/{rank['rank']}"
    error: Cell = (_text(rank.get("last_error")), "red")
    memory = rank.get("memory")
    used = [f"{rank['cpu']}%", format_bytes(memory)] if memory else ["-", "-"]
    return [
        name, _text(rank["host"]), _state(rank["state"]), _text(rank["step"] or None), *used, _text(rank["pid"]), error
    ]  # fmt: skip


def draw_jobs(console: Console, document: Document) -> None:
    """Draw the result of `jobs`: one row a job, its ranks counted."""
    if not document["jobs"]:
        say(console, "no jobs")
        return
    rows: list[list[Cell]] = []
    for job in document["jobs"]:
        ranks = job.get("ranks", [])
        hosts = sorted({str(rank["host"]) for rank in ranks} or {_text(job.get("head"))})
        counts = {role: str(sum(rank["role"] == role for rank in ranks)) for role in ("worker", "server")}
        if job["state"] == "unknown":
            counts = dict.fromkeys(counts, "-")
        rows.append(
            [
                job["job"], _state(job["state"]), _text(job["step"]),
                date_time(job["started"]) if job.get("started") else "-",
                counts["worker"], counts["server"],
                " ".join(hosts) if len(hosts) < 3 or not console.is_terminal else f"{len(hosts)} hosts",
            ]
        )  # fmt: skip
    heads = ("job", "state", "step", "started", "workers", "servers", "hosts")
    draw_table(console, heads, rows, right=("step", "workers", "servers"))


SIGNED = {"job": "signed by its job", "other": "signed by an authority not known here", "none": "not signed"}
"""Text for the signer of a checkpoint's manifest."""


def draw_checkpoints(console: Console, document: Document) -> None:
    """Draw the result of `checkpoint list`, and of `verify`, which adds problems."""
    if not document["checkpoints"]:
        say(console, "no checkpoints")
        return
    rows: list[list[Cell]] = []
    for entry in document["checkpoints"]:
        metrics = " ".join(f"{name}={number(value)}" for name, value in (entry.get("metrics") or {}).items())
        whole: Cell = ("complete", "green") if entry["complete"] else ("torn", "bold red")
        if "verified" in entry:
            whole = ("verified", "green") if entry["verified"] else ("damaged", "bold red")
        described = f"{metrics} {SIGNED[entry['signed']]}".lstrip() if "signed" in entry else metrics
        notes = "; ".join(entry.get("problems", [])) or entry.get("problem") or described or "-"
        written = date_time(entry["time"]) if entry["time"] else "-"  # a folder without a manifest has no time
        hosts = ", ".join(entry.get("hosts", [])) or "-"
        rows.append([entry["id"], written, format_bytes(entry["bytes"]), whole, hosts, notes])
    draw_table(console, ("checkpoint", "written", "size", "state", "hosts", "metrics"), rows, right=("size",))


def draw_pruned(console: Console, document: Document) -> None:
    """Draw the result of `checkpoint prune`: the removed and the kept checkpoints."""
    removed, kept = document["checkpoints"], document["kept"]
    size = sum(int(row["bytes"]) for row in removed)
    nothing = f"nothing: {one_line(document['job'])} has {len(kept)} checkpoints on {document['host']}"
    torn = [row for row in kept if not row["complete"]]
    draw_fields(console, {
        "removed": f"{_ids(removed)} ({format_bytes(size)})" if removed else nothing,
        "kept": _ids([row for row in kept if row["complete"]]) or "none",
        **({"torn": f"{_ids(torn)}: prune does not remove them"} if torn else {}),
        **({"copies": f"removed on {', '.join(document['copies'])}"} if document["copies"] else {}),
    })  # fmt: skip


def _ids(rows: Sequence[Document]) -> str:
    return ", ".join(str(row["id"]) for row in rows)


def draw_fields(console: Console, fields: Mapping[str, object]) -> None:
    """Draw names and values (`checkpoint show`, `up --dry-run`'s head ...), one a line."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        label = f"{name:<{width}}  " if console.is_terminal else f"{name}\t"
        say(console, Text.assemble((label, "dim"), one_line(_text(value))))


def draw_plan(console: Console, document: Document) -> None:
    """Draw the result of `plan`: every candidate, best first; the choice and its reason last."""
    rows: list[list[Cell]] = []
    steps_known = any(entry.get("step_seconds") is not None for entry in document["candidates"])
    for entry in document["candidates"]:
        chosen = entry["strategy"] == document["chosen"]
        per_rank, steps = entry.get("bytes_per_rank"), entry.get("steps")
        why = entry["bottleneck"] if entry["feasible"] else entry["why_not"]
        rows.append(
            [
                (entry["strategy"], "bold green" if chosen else "" if entry["feasible"] else "dim"),
                *([_seconds(entry.get("step_seconds")), _seconds(entry.get("hidden_seconds"))] if steps_known else []),
                _seconds(entry["seconds"]),
                _text(steps), format_bytes(per_rank) if per_rank is not None else "-",
                (_text(why), "" if entry["feasible"] else "dim"),
            ]
        )  # fmt: skip
    if (switches := document.get("in_network")) is not None:
        empty = ["", ""] if steps_known else []
        size = format_bytes(switches["bytes_per_host"])
        why = f"{one_line(switches['why_not'])} ({one_line(switches['source'])})"
        rows.append([(switches["strategy"], "dim"), *empty, _seconds(switches["seconds"]), "", size, (why, "dim")])
    more = ("a step", "hidden") if steps_known else ()
    heads = ("strategy", *more, "predicted", "steps", "bytes/rank", "bottleneck, or why not")
    draw_table(console, heads, rows, right=(*more, "predicted", "steps", "bytes/rank"))
    size = f"{format_bytes(document['size'])} of gradients" if document.get("size") else "gradients of unknown size"
    feasible = [entry for entry in document["candidates"] if entry["feasible"]]
    coded = {entry.get("params", {}).get("compression", "") for entry in feasible} - {""}
    size += "".join(f", {one_line(each)}" for each in sorted(coded))
    decided = "decided" if document.get("decided") else "before the run"
    winners = [
        [format_bytes(each["size"]), each["chosen"], format_seconds(each["seconds"]) if each["seconds"] else "-"]
        for each in document.get("winners", [])
    ]
    if winners:
        draw_table(console, ("gradients", "fastest", "predicted"), winners, right=("gradients", "predicted"))
    if len(document.get("by_size", [])) > 1:
        say(console, Text(f"by size: {_spans(document['by_size'])}", style="dim"))
    head = f"{size}, {document['world']} ranks, {decided}: "
    say(
        console,
        Text.assemble(head, (one_line(document["chosen"]), "bold green"), f", {one_line(document['reason'])}"),
    )
    if "terms" in document:
        draw_terms(console, document["terms"])
    if "capacity" in document:
        draw_capacity(console, document["capacity"])


def draw_terms(console: Console, found: Document) -> None:
    """Draw the terms of a step with one strategy (`plan --explain`), and their sum."""
    known = [each["seconds"] for each in found["terms"] if each["seconds"] is not None]
    rows: list[list[Cell]] = [
        [f"{number}. {each['term']}", _seconds(each["seconds"]), one_line(each["how"])]
        for number, each in enumerate(found["terms"], 1)
    ]
    rows.append(["sum, if nothing overlaps", _seconds(sum(known)), ""])
    draw_table(console, (f"a step with {found['strategy']}", "predicted", "of"), rows, right=("predicted",))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def draw_capacity(console: Console, found: Document | None) -> None:
    """Draw the servers that a model needs (`plan --parameters`)."""
    if found is None:
        say(console, Text("no host may hold a server, so every worker holds the whole model", style="yellow"))
        return
    saved = found["checkpoint"]
    survives = "the loss of servers goes back to the last checkpoint"
    if found["survives"]:
        survives = f"any {found['survives']} servers may be lost at once"
    rest, most = format_bytes(found["memory_a_server"]), format_bytes(found["memory_a_server_at_most"])
    rows = {
        "parameters": f"{format_count(found['parameters'])}, {format_bytes(found['bytes'])} as float32",
        "servers": f"{found['servers']} (hosts: {found['hosts']}), each of {format_bytes(found['values_a_server'])}",
        "shards": f"{format_count(found['shards'])} of at most {format_bytes(found['largest_shard'])}",
        "replicas": f"{found['replicas']}: {survives}",
        "memory a server": f"{rest} with Adam's state; while workers push at most {most}",
        "vector clocks": f"at most {format_count(found['clocks'])}, {format_bytes(found['clock_bytes_at_most'])}",
        "a checkpoint": f"{format_bytes(saved['bytes'])}, {format_seconds(saved['seconds'])} to write; every "
        f"{format_seconds(saved['interval'])} is best for a failure every {format_seconds(saved['between_failures'])}, "
        f"costs {saved['overhead']:.1%}",
    }
    draw_fields(console, rows)
    table: list[list[Cell]] = [
        [
            each["consistency"] + (f" {each['staleness']}" if each["consistency"] == "ssp" else ""),
            f"{each['clock']:.2f}", f"{each['idle']:.0%}", f"{each['step']:.3f}" if each["step"] is not None else "-",
        ]
        for each in found["waiting"]
    ]  # fmt: skip
    heads = ("consistency", "clock, of a worker's mean", "idle", "step x curvature below")
    draw_table(console, heads, table, right=heads[1:])
    say(console, Text("where workers' times vary at random (exponential); one that stays slow holds up all but asp"))


def _spans(spans: Sequence[Document]) -> str:
    """Return the chosen strategies by size, in one line."""
    ends = [f" up to {format_bytes(span['from'])}" for span in spans[1:]]
    return ", ".join(one_line(span["chosen"]) + end for span, end in zip(spans, [*ends, " above"], strict=True))


def draw_dry_run(console: Console, document: Document) -> None:
    """Draw the result of `train --dry-run`: processes, hosts, ports, files, plan.

    Args:
        document: `{"job", "processes": [{"role", "rank", "host"}], "hosts": [{"name", "address", "interface",
            "actions"}], "ports", "prometheus", "files": [{"path", "bytes"}], "plan"}`; absent parts are not drawn.
    """
    say(console, Text(f"{one_line(document['job'])}: nothing was started", style="bold"))
    processes: list[list[Cell]] = [
        [f"{p['role']}/{p['rank']}", _text(p["host"])] for p in document.get("processes", [])
    ]
    if processes:
        draw_table(console, ("process", "host"), processes)
    hosts: list[list[Cell]] = [
        [
            host["name"], _text(host.get("address")), _text(host.get("interface")),
            "; ".join(host.get("actions", [])) or "nothing to do",
        ]
        for host in document.get("hosts", [])
    ]  # fmt: skip
    if hosts:
        draw_table(console, ("host", "address", "interface", "actions"), hosts)
    data = document.get("data", [])
    if data:
        rows: list[list[Cell]] = [
            [
                _text(each["from"]), _text(each["to"]),
                "" if each["files"] is None else str(each["files"]),
                "" if each["bytes"] is None else format_bytes(each["bytes"]),
            ]
            for each in data
        ]  # fmt: skip
        draw_table(console, ("data", "to", "files", "size"), rows, right=("files", "size"))
    files = document.get("files", [])
    if files:
        draw_table(console, ("file", "size"), [[f["path"], format_bytes(f["bytes"])] for f in files], right=("size",))
    if document.get("ports"):
        draw_fields(console, {"ports": document["ports"]})
    if document.get("prometheus"):
        draw_fields(console, {"prometheus": f"http://{document['prometheus']}/metrics on the head"})
    if document.get("plan"):
        draw_plan(console, document["plan"])


SHOWN = 8
"""Numbers of a value that are drawn; -o json has all."""


def draw_store(console: Console, document: Document) -> None:
    """Draw keys of a store and their values, or its tables."""
    entries = document["entries"]
    if not entries:
        tables = [_store_row(each) for each in document["tables"]]
        heads = ("key", "shape", "type", "joined by", "rows", "bytes", "hits", "admitted", "expired", "evicted")
        draw_table(console, heads, tables, right=heads[4:])
        return
    rows = []
    for entry in entries:
        value = entry["value"]
        text = "nothing was pushed" if value is None else " ".join(f"{number:g}" for number in value[:SHOWN])
        more = f" ... ({len(value)} numbers)" if value is not None and len(value) > SHOWN else ""
        rows.append([one_line(entry["key"]), str(list(entry["shape"])), entry["dtype"], text + more])
    draw_table(console, ("key", "shape", "type", "value"), rows)


def _store_row(table: Document) -> list[Cell]:
    """Return a table's line: its description, and its counts; hits: the share of pushed rows that existed."""
    name, stats = one_line(table["name"]) or "(integer keys)", table["stats"]
    how = f"{table['reduce']}, {table['optimizer']}" if table["optimizer"] else table["reduce"]
    found: list[Cell] = [name, str(list(table["shape"])), table["dtype"], how]
    if not stats:
        return [*found, *[""] * 6]
    hits = f"{stats['pushed_found'] / stats['pushed']:.0%}" if stats["pushed"] else "-"
    counts = (f"{stats[each]:,}" for each in ("admitted", "expired", "evicted"))
    return [*found, f"{stats['keys']:,}", format_bytes(stats["bytes"]), hits, *counts]


def draw_bench(console: Console, document: Document) -> None:
    """Draw the result of `bench`: by size, the fastest first; then the choice of `auto`.

    Args:
        console: of stdout.
        document: as `bench -o json` prints it.
    """
    winners = {each["bytes"]: each for each in document["sizes"]}
    rows: list[list[Cell]] = []
    for row in sorted(document["results"], key=lambda each: (each["bytes"], each["seconds"]["median"])):
        rows.append(_bench_row(row, winners.get(row["bytes"], {}).get("winner") == row["strategy"]))
    heads = ("size", "strategy", "median", "min", "max", "algbw", "busbw", "predicted", "of measured", "sum")
    draw_table(
        console, heads, rows, right=("size", "median", "min", "max", "algbw", "busbw", "predicted", "of measured")
    )
    for size in document["sizes"]:
        say(console, _winner_sentence(size))
    if "congestion" in document:
        say(console, _congestion_sentence(document["congestion"]))


def _bench_row(row: Document, won: bool) -> list[Cell]:
    seconds, predicted = row["seconds"], row["predicted_seconds"]
    share = "-" if predicted is None or not seconds["median"] else f"{predicted / seconds['median']:.2f}"
    name: Cell = (f"{row['strategy']} *", "bold green") if won else row["strategy"]
    return [
        format_bytes(row["bytes"]), name, format_seconds(seconds["median"]), format_seconds(seconds["min"]),
        format_seconds(seconds["max"]), format_rate(row["algbw"]), format_rate(row["busbw"]),
        format_seconds(predicted) if predicted is not None else "-", share,
        "right" if row["correct"] else ("WRONG", "bold red"),
    ]  # fmt: skip


def _winner_sentence(size: Document) -> str:
    won = f"{format_bytes(size['bytes'])}: {size['winner']} is the fastest"
    if size["auto"] == size["winner"]:
        return f"{won}, and auto takes it"
    if size["regret"] is None:
        return f"{won}; auto would take {size['auto']}, which was not measured"
    return f"{won}; auto would take {size['auto']}, {size['regret']:.0%} slower"


def _congestion_sentence(found: Document) -> str:
    each = ", ".join(f"{one['congestion']} {format_seconds(one['seconds']['median'])}" for one in found["measured"])
    if found["recommended"] == found["now"]:
        return f"congestion control: {each}; stay with {found['now']}"
    return f"congestion control: {each}; set network: {{congestion: {found['recommended']}}} in the cluster file"
