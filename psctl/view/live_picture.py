"""The live picture of a job as one drawing that fits a given width and height. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psctl.job.activity import PARTS
from psctl.job.events import Recovering
from psctl.units import format_bytes, format_count, format_rate, format_seconds
from psctl.view.chart import LEAST_HEIGHT, LEAST_WIDTH, chart
from psctl.view.console import ROLE_STYLES, STATE_STYLES, Glyphs, state_text
from psctl.view.job_view import ERROR, WARNING, JobView, RecentEvent
from psctl.view.rank_rows import RankRow, rank_rows
from psctl.view.text import clock_time, number, one_line, sparkline, split, wrap

_SEVERITY_STYLES = {ERROR: "bold red", WARNING: "yellow"}
_LABEL = 12  # columns of the labels at the left
_LONG_IMPORT = 60.0  # seconds after which a script probably never calls psctl.init
_CHART_ROWS = 14
_TWO_CHARTS = 110  # columns from which on two charts stand side by side
_PART_STYLES = ("blue", "yellow", "magenta", "cyan", "green")  # of PARTS
_RULE = 60  # columns of the rule on top; a terminal reflows only lines that are wider than its new width


def picture(state: JobView, width: int, height: int, age: float, hint: str, glyphs: Glyphs) -> Group:
    """Return the drawing.

    Args:
        state: the state of the job.
        width, height: of the terminal, in cells.
        age: seconds since the newest event arrived.
        hint: the line at the bottom: the effect of Ctrl-C.
    """
    footer = [Text(line, style="dim") for line in wrap(hint, width, height) if hint][:height]
    room = height - 1 - len(footer)  # the last row stays free: some terminals scroll when it is full
    rule = Text(glyphs.line * min(width, _RULE), style="dim", no_wrap=True)
    top = [rule, *_top(state, width, age, glyphs)][: max(0, room)]
    news = [line for event in state.recent(max(1, min(5, height // 6))) for line in _recent_event(event, width)]
    news = news[: max(0, room - len(top))]
    free = room - len(top) - len(news) - 3  # the blank lines and the table's head
    parts: list[RenderableType] = [*top]
    if state.ranks and free > 0:
        rows = rank_rows(state, free)
        parts += _charts(state, width, free - len(rows), glyphs)
        parts += [Text(""), ranks_table(rows, width, glyphs), Text("")]
    return Group(*parts, *news, *footer)


def _charts(state: JobView, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """Return the charts of the watched metric and of the throughput, where the terminal has rows for them."""
    height = min(_CHART_ROWS, room - 1)
    if height < LEAST_HEIGHT or width < LEAST_WIDTH or len(state.history.steps) < 2:
        return []
    both = width >= _TWO_CHARTS and len(state.throughput.steps) >= 2
    columns = (width - 2) // 2 if both else min(width, _TWO_CHARTS)
    drawn = []
    loss, speed = state.history, state.throughput
    title = f"{one_line(state.metric)} over steps" + (
        " (log scale)" if _is_logarithmic(loss.values, state.metric) else ""
    )
    drawn.append(
        chart(title, loss.steps, loss.values, state.total, columns, height, glyphs,
              logarithmic=_is_logarithmic(loss.values, state.metric))
    )  # fmt: skip
    if both:
        unit = "examples/s" if state.progress is not None and state.progress.examples_per_second else "steps/s"
        drawn.append(chart(unit, speed.steps, speed.values, state.total, columns, height, glyphs, logarithmic=False))
    rows = [Text("")]
    for parts in zip(*drawn, strict=True):
        row = Text(no_wrap=True)
        for index, part in enumerate(parts):
            row.append_text(part)
            if index + 1 < len(parts):
                row.append(" " * (columns + 2 - part.cell_len))
        rows.append(row)
    return rows


def _top(state: JobView, width: int, age: float, glyphs: Glyphs) -> Iterator[RenderableType]:
    yield _header(state, width, age)
    progress = state.progress
    if state.recovering is not None:
        yield _line("recovering", _recovery_text(state.recovering, state.latest + age))
    if progress is None:
        yield _line("step", _startup_text(state, age))
        if state.printed is not None and state.phase == "importing":
            ago = format_seconds(float(int(max(0.0, state.latest - state.printed.time + age))))
            yield _line("output", f"{ago} ago: {one_line(state.printed.text)}")
    else:
        yield _line("step", _speed(state, width - _LABEL, glyphs))
        if state.total:
            yield _bar(state, width, glyphs)
        if progress.metrics:
            yield _metrics(state, width, glyphs)
        yield _times(state, width, glyphs)
    if state.traffic and width >= 60 and (progress is None or len(state.hosts) > 1):
        yield _line("network", _network(state))
    yield _line("checkpoint", _checkpoint(state, age))


def _line(label: str, body: str | Text) -> Text:
    line = Text(f"{label:<{_LABEL}}", style="dim", no_wrap=True, overflow="ellipsis")
    return line.append_text(body) if isinstance(body, Text) else line.append(body, style="not dim")


def _header(state: JobView, width: int, age: float) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(state.job or "job", style="bold").append("  ").append_text(state_text(state.state))
    elapsed = state.latest - state.started + age
    if elapsed == elapsed:
        line.append(f"  {format_seconds(float(int(elapsed)))}")
    if state.plan is not None:
        line.append(f"  {one_line(state.plan.chosen)}", style="cyan")
    if state.hosts and width >= 60:
        line.append(f"  on {state.hosts[0] if len(state.hosts) == 1 else f'{len(state.hosts)} hosts'}", style="dim")
    return line


def _recovery_text(waits: Recovering, now: float) -> str:
    """Return the hosts that the job waits for, since when, and how much longer."""
    since, left = format_seconds(max(0.0, now - waits.since)), format_seconds(max(0.0, waits.until - now))
    return f"waiting for {', '.join(map(one_line, waits.hosts))} since {since}, {left} more at most"


def _startup_text(state: JobView, age: float) -> str:
    """Return the phase of the start, how far it is, and since when it lasts."""
    if not state.ranks:
        return "waiting for the hosts"
    ranks = list(state.ranks.values())
    workers = [rank for rank in ranks if rank.role == "worker"]
    lasts = state.latest + age - state.phase_since
    match state.phase:
        case "starting":
            text = f"starting: {sum(rank.state != 'starting' for rank in ranks)} of {len(ranks)} processes run"
        case "importing" if any(rank.joined for rank in workers):
            text = f"importing: {sum(rank.joined for rank in workers)} of {len(workers)} workers have called psctl.init"
        case "importing":
            doing = "importing" if lasts < _LONG_IMPORT and state.printed is None else "running"
            text = f"{doing} (without psctl.init steps are not counted)"
        case "loading":
            ready = sum(rank.prepared for rank in workers)
            text = f"loading data and model: {ready} of {len(workers)} workers have called prepare"
        case "connecting":
            ready = sum(rank.state != "waiting" for rank in workers)
            doing = f"restoring {state.continues}" if state.continues else "connecting"
            text = f"{doing}: {ready} of {len(workers)} workers have their first values"
        case _:
            text = "training: no step is reported yet"
    return f"{text}, {format_seconds(float(int(lasts)))}" if lasts >= 1 else text


def _network(state: JobView) -> str:
    """Return what hosts send and receive, the busiest first."""
    hosts = sorted(state.traffic.values(), key=lambda each: -each.sent - each.received)
    parts = [
        f"{one_line(each.host)} sends {format_rate(each.sent)}, receives {format_rate(each.received)}" for each in hosts
    ]
    return "; ".join(parts)


def _speed(state: JobView, width: int, glyphs: Glyphs) -> str:
    progress = state.progress
    assert progress is not None
    of = f" of {state.total:,}" if state.total else ""
    parts = [f"{state.step:,}{of}", f"epoch {progress.epoch}"]
    if progress.examples_per_second:
        parts.append(f"{format_count(progress.examples_per_second)} examples/s")
    if state.rate:
        parts.append(f"{format_count(state.rate)} steps/s")
    if progress.bytes_per_second:
        parts.append(format_rate(progress.bytes_per_second))
    between = f" {glyphs.dot} "
    while len(parts) > 1 and len(between.join(parts)) > width:
        parts.pop()
    return between.join(parts)


def _bar(state: JobView, width: int, glyphs: Glyphs) -> Text:
    """Return a bar of the whole training, and the time that is left."""
    share = min(1.0, state.step / state.total)
    cells = max(6, min(60, width - _LABEL - 24))
    full = min(cells, int(cells * share))
    body = Text(style="not dim")
    body.append(glyphs.full * full, style="green").append(glyphs.light * (cells - full), style="dim")
    body.append(f"  {int(100 * share)}%")
    if state.step < state.total and state.seconds_left == state.seconds_left:
        body.append(f", {format_seconds(_rounded(state.seconds_left))} left")
    return _line("", body)


def _rounded(seconds: float) -> float:
    """Round a time that is foretold: nobody needs the seconds of an hour."""
    step = 1 if seconds < 60 else 10 if seconds < 600 else 60
    return float(step * round(seconds / step))


def _metrics(state: JobView, width: int, glyphs: Glyphs) -> Text:
    assert state.progress is not None
    metrics = state.progress.metrics
    others = [f"{name} {number(value)}" for name, value in metrics.items() if name != state.metric]
    body = Text(number(metrics.get(state.metric)), style="bold")
    rest = "  ".join(others)
    columns = max(8, min(40, width - _LABEL - 10 - min(len(rest), 30)))
    curve = sparkline(_scaled(state.history.values, state.metric), columns, glyphs.blocks)
    body.append(f"  {curve}", style="not bold green")
    if rest:
        body.append(f"  {rest}", style="not bold")
    return _line(f"{state.metric:.{_LABEL - 1}}", body)


def _is_logarithmic(values: list[float], name: str) -> bool:
    """Return whether a metric is drawn on a log scale: a loss is, for its last digits to be seen."""
    return "loss" in name.lower() and all(value > 0 for value in values)


def _scaled(values: list[float], name: str) -> list[float]:
    return [math.log(value) for value in values] if _is_logarithmic(values, name) else values


def _times(state: JobView, width: int, glyphs: Glyphs) -> Text:
    progress = state.progress
    assert progress is not None
    compute, sync = progress.compute_seconds, progress.sync_seconds
    text = Text.assemble("compute ", (format_seconds(compute), "blue"), ", sync ", (format_seconds(sync), "yellow"))
    if progress.hidden_seconds > 0:
        text.append(f" and {format_seconds(progress.hidden_seconds)} hidden")
    body = Text(style="not dim")
    cells = min(30, width - _LABEL - 2 - text.cell_len)
    if cells >= 6:
        left, right = split(cells, compute, sync)
        body.append(glyphs.full * left, style="blue").append(glyphs.light * right, style="yellow").append("  ")
    return _line("a step", body.append_text(text))


def _checkpoint(state: JobView, age: float) -> str:
    written = state.checkpoint
    if written is None:
        return "none yet"
    ago = format_seconds(float(int(max(0.0, state.latest - written.time + age))))
    return f"step {written.step:,}, {ago} ago, {format_bytes(written.bytes)} in {format_seconds(written.seconds)}"


def ranks_table(rows: list[RankRow], width: int, glyphs: Glyphs) -> Table:
    """Return the table of ranks, with fewer columns on narrow terminals."""
    errors = any(row.error for row in rows)
    stale = any(row.staleness for row in rows)
    pids = width >= (100 if any(row.gpu_memory for row in rows) else 80) and any(row.pid for row in rows)
    usage = width >= 80 and any(row.memory for row in rows)
    gpus = width >= 80 and any(row.gpu_memory for row in rows)
    gpu_memory = gpus and width >= 100
    traffic = width >= (120 if gpus else 100) and any(row.sends or row.receives for row in rows)
    parts = width >= 150 and any(row.parts for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=errors)
    table.add_column("rank", no_wrap=True, min_width=9)
    table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=max(8, width // 4))
    table.add_column("state", no_wrap=True)
    table.add_column("step", no_wrap=True, justify="right")
    table.add_column("steps/s", no_wrap=True, justify="right")
    if stale:
        table.add_column("stale", no_wrap=True, justify="right")
    if usage:
        for head in ("cpu", "memory", "sync"):
            table.add_column(head, no_wrap=True, justify="right")
    if gpus:
        for head in ("gpu", "gpu memory")[: 1 + gpu_memory]:
            table.add_column(head, no_wrap=True, justify="right")
    if traffic:
        for head in ("sends", "receives"):
            table.add_column(head, no_wrap=True, justify="right")
    if parts:
        table.add_column(_parts_head(glyphs), no_wrap=True)
    if pids:
        table.add_column("pid", no_wrap=True, justify="right")
    if errors:
        table.add_column("note", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        low, high = row.steps
        cells: list[RenderableType] = [
            Text(row.rank, style=ROLE_STYLES.get(row.rank.partition("/")[0], "")),
            Text(row.host),
            Text(row.state, style=STATE_STYLES.get(row.state, "")),
            Text(f"{low:,}" if low == high else f"{low:,}-{high:,}") if high else Text("-"),
            Text(format_count(row.rate) if row.rate else "-"),
        ]
        cells += [Text(f"{row.staleness:,}" if row.staleness else "-")] if stale else []
        if usage:
            cells += [
                Text(f"{row.cpu}%" if row.memory else "-"),
                Text(format_bytes(row.memory) if row.memory else "-"),
                Text(f"{row.sync}%" if "worker" in row.rank else "-"),
            ]
        cells += [Text(f"{row.gpu}%" if row.gpu_memory else "-")] if gpus else []
        cells += [Text(format_bytes(row.gpu_memory) if row.gpu_memory else "-")] if gpu_memory else []
        if traffic:
            cells += [Text(format_rate(rate) if rate else "-") for rate in (row.sends, row.receives)]
        cells += [_parts_bar(row.parts, glyphs)] if parts else []
        cells += [Text(str(row.pid) if row.pid else "-")] if pids else []
        cells += [Text(row.error, style="red" if row.state in ("failed", "lost") else "dim")] if errors else []
        table.add_row(*cells)
    return table


def _parts_head(glyphs: Glyphs) -> Text:
    """Return the head of the column of bars: each part of a worker's time with its character."""
    named = zip(PARTS, _PART_STYLES, glyphs.parts, strict=True)
    return Text(" ").join(Text(f"{mark}{name}", style=f"not dim {style}") for name, style, mark in named)


def _parts_bar(parts: Mapping[str, int], glyphs: Glyphs) -> Text:
    """Return a bar of how a worker's time is divided; what is left is time outside of steps."""
    cells = cell_len(_parts_head(glyphs).plain)
    ends = [cells * sum(parts.get(name, 0) for name in PARTS[: index + 1]) // 100 for index in range(len(PARTS))]
    bar, begin = Text(), 0
    for end, style, mark in zip(ends, _PART_STYLES, glyphs.parts, strict=True):
        bar.append(mark * (min(end, cells) - begin), style=style)
        begin = min(end, cells)
    return bar


def _recent_event(event: RecentEvent, width: int) -> list[Text]:
    style = _SEVERITY_STYLES.get(event.severity, "")
    times = f" (x{event.count})" if event.count > 1 else ""
    moment = f"{clock_time(event.time)} "
    first, *rest = wrap(event.text + times, width - len(moment), 2)
    indent = " " * len(moment)
    return [Text.assemble((moment, "dim"), (first, style)), *(Text(indent + line, style=style) for line in rest)]
