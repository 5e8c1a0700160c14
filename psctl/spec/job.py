"""job.yaml: the script, its workers and servers, the synchronisation of gradients, and the checkpoints."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from psctl import types, units
from psctl.errors import UsageError
from psctl.spec import yaml_nodes
from psctl.spec.cluster import VARIABLE, ClusterSpec
from psctl.spec.data import DataSpec, check_data, check_outputs
from psctl.spec.decode import Decoder, raise_all
from psctl.spec.fields import (
    Doc,
    Internal,
    Notation,
    Section,
    choice,
    duration,
    real,
    size,
    text,
    truth,
    whole,
)
from psctl.spec.groups import GroupSpec, check_groups
from psctl.spec.metrics import MetricsSpec

AUTO = "auto"
Auto = Literal["auto"]

NAME = r"(?!.*-[0-9]+$)[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
"""A job's name; psctl numbers its runs NAME-1, NAME-2 ..., so a name of that form is refused."""

OWN_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE", "PSCTL_JOB", "PSCTL_ROLE", "PSCTL_HOST", "PSCTL_GROUP", "PSCTL_ORDERS",
})  # fmt: skip
"""Variables that psctl sets for each process; a job file cannot."""

_PATH = text("a path", r"(?!-).+")


class PerHost(Section, frozen=True):
    """A number of processes on every host."""

    per_host: Annotated[int, whole(1, 4096), Doc("Processes on every host.")]


class Elastic(Section, frozen=True):
    """A number of workers that follows the free slots."""

    min: Annotated[int, whole(1, 65536), Doc("Fewest workers; with fewer the job waits for hosts.")] = 1
    max: Annotated[int, whole(1, 65536), Doc("Most workers.")] = 65536


class Ssp(Section, frozen=True):
    """Stale synchronous: a bound on the clocks that the fastest worker is ahead of the slowest."""

    ssp: Annotated[int, whole(0, 1_000_000), Doc("Clocks that the fastest may be ahead of the slowest.")]


class TopK(Section, frozen=True):
    """Send only the largest elements of a gradient."""

    topk: Annotated[float, real(0, 1), Doc("Share of the elements that is sent.")]


class Filter(Section, frozen=True):
    """A choice of the elements of a gradient that are sent; one key a filter."""

    random_skip: Annotated[
        float | None, real(0, 1), Doc("Probability with which an element is left out; the others are scaled up.")
    ] = None
    significance: Annotated[
        float | None, real(0, 1), Doc("Threshold in parts of the root mean square; smaller elements are sent later.")
    ] = None


class SyncSpec(Section, frozen=True):
    """The synchronisation of gradients."""

    strategy: Annotated[
        str,
        choice(AUTO, *types.STRATEGIES),
        Doc("Strategy of synchronisation; auto: the one that the plan predicts to be fastest."),
    ] = AUTO
    consistency: Annotated[
        Literal["bsp", "asp"] | Ssp,
        Doc("bsp: all workers step together. asp: no worker waits. {ssp: N}: at most N clocks apart."),
    ] = "bsp"
    update: Annotated[
        Literal["auto", "server", "worker", "sharded"],
        Doc(
            "Where the optimizer steps; auto: on the servers where they can. sharded: each worker steps a part of the "
            "parameters, and holds only this part of the optimizer's state (collectives)."
        ),
    ] = "auto"
    sums: Annotated[
        Literal["auto", "host", "rack"],
        Doc(
            "Under ps: gradients of a host's workers are summed before they are pushed, or those of a rack's (one "
            "worker a host), which then also pulls once; auto: by rack where the plan predicts a gain."
        ),
    ] = "auto"
    period: Annotated[int, whole(1), Doc("Local steps between two synchronisations.")] = 1
    compression: Annotated[
        Literal["none", "bf16", "fp16", "int8", "onebit"] | TopK,
        Doc("Compression of gradients; {topk: 0.01}: only the largest hundredth of the elements is sent."),
    ] = "none"
    filters: Annotated[
        tuple[Filter, ...],
        Doc("Choice of the elements that are sent: {random_skip: P}, {significance: V}; under ps."),
    ] = ()
    batchnorm: Annotated[
        Literal["local", "sync"],
        choice("local", "sync"),
        Doc(
            "BatchNorm's statistics: local to each worker (rank 0's are kept); sync: of all workers' batches, by two "
            "sums of short vectors a layer and step."
        ),
    ] = "local"
    factor_rows: Annotated[
        int | None,
        whole(1, 1_000_000),
        Doc(
            "Rows of a worker's batch, at most. Gradients of linear layers are then sent as factors (their inputs and "
            "output gradients) where that takes less time; null: never."
        ),
    ] = None
    bucket: Annotated[
        Auto | int | None,
        size(1, also=AUTO),
        Doc(
            "Bytes of gradients that a collective sums together; auto: the fastest size of those tried at first; null: "
            "25 MB, and 4 MB where the optimizer is sharded."
        ),
    ] = None
    step_in_backward: Annotated[
        bool,
        truth(),
        Doc(
            "With update: sharded or server, step some parameters while backward still runs, so that their values "
            "travel then. Learning rates must be set before backward, and gradients cannot be clipped."
        ),
    ] = False
    size: Annotated[int | None, size(), Doc("Bytes of gradients, for planning before the run.")] = None
    compute: Annotated[
        float | None,
        duration(86400),
        Doc("Compute of a step, forward and backward. The plan then compares whole steps; null: synchronisations."),
    ] = None
    replan: Annotated[
        bool,
        truth(),
        Doc("Take another strategy at a checkpoint where the first steps show that it is faster; with strategy: auto."),
    ] = False

    @property
    def compressed(self) -> types.Compression:
        """Compression and filters as one value."""
        topk = self.compression if isinstance(self.compression, TopK) else None
        kind = "topk" if topk is not None else str(self.compression)
        skip = next((each.random_skip for each in self.filters if each.random_skip is not None), 0.0)
        significance = next((each.significance for each in self.filters if each.significance is not None), 0.0)
        return types.Compression(kind, topk.topk if topk is not None else 1.0, skip, significance)


class LoaderSpec(Section, frozen=True):
    """The examples that `run.loader` gives to each worker."""

    share: Annotated[
        Literal["even", "speed"],
        Doc(
            "even: workers have as many examples of a step. speed: by measured speeds, so that all take as long; the "
            "gradient is the mean over all examples all the same."
        ),
    ] = "even"


class KeepBest(Section, frozen=True):
    """The best checkpoint, which is kept whatever its age."""

    metric: Annotated[str, text("the name of a reported number"), Doc("A number that the script reports.")] = "loss"
    mode: Annotated[Literal["min", "max"], Doc("min: the smallest is best. max: the largest.")] = "min"


class Every(msgspec.Struct, frozen=True):
    """The interval between checkpoints: in steps, in seconds, or chosen by psctl; the other ones are 0."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False


def _every() -> Notation:
    def parse(scalar: yaml_nodes.Scalar) -> Every:
        if scalar.text == "auto":
            return Every(auto=True)
        match = re.fullmatch(r"([0-9]{1,12}) ?steps?", scalar.text)
        if match is None and not re.search("[a-zµ]", scalar.text):
            raise ValueError
        every = Every(steps=int(match[1])) if match else Every(seconds=units.parse_duration(scalar.text))
        if every.steps < 1 and every.seconds < 1:
            raise ValueError("expected at least 1 step or 1s")
        return every

    return Notation('"500 steps", a duration such as 10m, or auto', parse, {"type": "string"})


class CheckpointSpec(Section, frozen=True):
    """Checkpoints: their interval, their folder, and how many are kept."""

    to: Annotated[
        str | None, _PATH, Doc("Folder (on the head) or URL to which checkpoints are uploaded; null: not uploaded.")
    ] = None
    every: Annotated[Every | None, _every(), Doc("Interval: 500 steps, a duration, or auto; null: never.")] = Every(
        steps=500
    )
    keep: Annotated[int, whole(1, 100_000), Doc("Number of newest checkpoints that are kept.")] = 3
    keep_best: Annotated[KeepBest | None, Doc("The best checkpoint is kept in addition to the newest; null: none.")] = (
        KeepBest()
    )
    on_stop: Annotated[bool, truth(), Doc("Write a checkpoint when the job is stopped.")] = True
    copies: Annotated[int, whole(0, 16), Doc("Further hosts that hold a copy of every checkpoint.")] = 1
    full_every: Annotated[
        int,
        whole(1, 1000),
        Doc("Of so many checkpoints of tables one writes all rows, the others those that changed; 1: always all."),
    ] = 10


class RestartSpec(Section, frozen=True):
    """How the job continues after losses."""

    max: Annotated[int, whole(0, 1000), Doc("Losses of workers, servers and hosts that the job survives.")] = 3

    on_worker_loss: Annotated[
        Literal["wait", "continue"],
        Doc("wait: another worker replaces the lost one and repeats the step. continue: continue with fewer workers."),
    ] = "wait"

    wait: Annotated[
        float,
        duration(7 * 86400),
        Doc("Time for lost hosts to return when the others have too few slots; 0: the job ends at once."),
    ] = 600.0


class TimeoutSpec(Section, frozen=True):
    """Longest waits, in seconds."""

    start: Annotated[float, duration(86400, 1), Doc("From the start until every process has joined.")] = 120.0
    stall: Annotated[
        float,
        duration(30 * 86400, 1),
        Doc("Time without a step or other progress after which the job ends."),
    ] = 300.0
    total: Annotated[float | None, duration(3660 * 86400, 1), Doc("For the whole job; null: no limit.")] = None


class LogsSpec(Section, frozen=True):
    """The log files of the processes."""

    max: Annotated[int, size(1_000_000), Doc("Size of a rank's log files on a host; the newest lines are kept.")] = (
        1_000_000_000
    )


class JobSpec(Section, frozen=True):
    """A job: its script, its workers and servers, and their settings."""

    name: Annotated[
        str,
        text("a name of letters, digits, . _ - that does not end in -digits", NAME),
        Doc("Job's name; its runs are NAME-1, NAME-2 ..."),
    ]
    version: Annotated[int, whole(1, 1), Doc("Version of this file's format.")] = 1
    script: Annotated[str | None, _PATH, Doc("Script to run, relative to workdir; or give module.")] = None
    module: Annotated[
        str | None,
        text("a module such as pkg.train", r"[^\W\d]\w*(\.[^\W\d]\w*)*"),
        Doc("Module to run, in place of script."),
    ] = None
    args: Annotated[tuple[str, ...], text(), Doc("Arguments of the script.")] = ()
    workdir: Annotated[str, _PATH, Doc("Folder sent to every host, relative to this file.")] = "."
    exclude: Annotated[
        tuple[str, ...],
        text("a pattern as in .gitignore"),
        Doc("Files of workdir that are not sent, in addition to those in .gitignore."),
    ] = ()
    data: Annotated[
        tuple[DataSpec, ...], Doc("Data that every host gets once, whatever its size: [{from: ./corpus, to: corpus}].")
    ] = ()
    outputs: Annotated[
        tuple[str, ...],
        text("a pattern as in .gitignore"),
        Doc("Files that the script writes and that are fetched from all hosts when the job ends."),
    ] = ()
    cluster: Annotated[str | None, _PATH, Doc("Cluster file or name; null: the current one.")] = None
    workers: Annotated[
        Auto | int | PerHost | Elastic,
        whole(1, 65536, also=AUTO),
        Doc("auto: one a GPU, else one a host (local: 2); N; {per_host: N}; {min: N, max: M}: as many as have slots."),
    ] = "auto"
    servers: Annotated[
        Auto | int | PerHost,
        whole(0, 65536, also=AUTO),
        Doc("auto: the number that the plan chooses; N; {per_host: N}. For ps only."),
    ] = "auto"
    seed: Annotated[int, whole(0, 2**32 - 1), Doc("Seed of python, numpy and torch on every worker.")] = 0
    sync: Annotated[SyncSpec, Doc("How gradients are synchronised.")] = SyncSpec()
    loader: Annotated[LoaderSpec, Doc("The examples that run.loader gives to each worker.")] = LoaderSpec()
    groups: Annotated[
        tuple[GroupSpec, ...],
        Doc("Further groups of processes, which read the servers while the workers train; strategy: auto is then ps."),
    ] = ()
    replicas: Annotated[Auto | int, whole(0, 64, also=AUTO), Doc("Copies of every shard beyond the first.")] = "auto"
    checkpoint: Annotated[CheckpointSpec, Doc("Checkpoints: interval, folder, number.")] = CheckpointSpec()
    restart: Annotated[RestartSpec, Doc("How the job continues after losses.")] = RestartSpec()
    logs: Annotated[LogsSpec, Doc("The log files of the processes.")] = LogsSpec()
    timeouts: Annotated[TimeoutSpec, Doc("Longest waits.")] = TimeoutSpec()
    env: Annotated[
        dict[str, str | None],
        VARIABLE,
        text(),
        Doc("Variables of every worker; without a value: taken from your shell."),
    ] = msgspec.field(default_factory=dict)
    secrets: Annotated[
        tuple[str, ...],
        text(VARIABLE.expected, VARIABLE.pattern),
        Doc("Variables taken from your shell whose values psctl never shows."),
    ] = ()
    metrics: Annotated[MetricsSpec, Doc("The record of the run.")] = MetricsSpec()
    source: Annotated[str, Internal()] = ""


def load_job(text: str, source: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file.

    Args:
        text: the text of the file.
        source: its name, for messages.
        overrides: `key=value` of --set, such as "sync.strategy=ps"; they replace keys of the file.

    Raises:
        InvalidFile: malformed or contradictory; the user's fault, with file:line:column, or the --set.
        UsageError: an override that is no key=value.
    """
    decoder = Decoder({"cluster file": ClusterSpec})
    node = yaml_nodes.parse(text, source, decoder.problems)
    for override in overrides:
        node = _override(node, override)
    spec = decoder.make(node, JobSpec)
    for keys, contradictions in _CONTRADICTIONS.items():
        if decoder.sound(*keys):
            for path, message, hint in contradictions(spec):
                decoder.refuse(path, message, hint)
    raise_all(decoder.problems)
    return msgspec.structs.replace(spec, source=source)


def _override(node: yaml_nodes.Node, override: str) -> yaml_nodes.Node:
    """Return the file with one key replaced or added, with the sections that it needs."""
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.strip()):
        raise UsageError(
            f"--set {override}: expected key=value",
            "such as --set sync.strategy=ps; every key: psctl validate --schema",
        )
    where = f"--set {override}"
    return _put(node, key.strip().split("."), yaml_nodes.parse_value(value, where), where)


def _put(node: yaml_nodes.Node | None, path: list[str], value: yaml_nodes.Node, where: str) -> yaml_nodes.Node:
    if not path:
        return value
    below = node if isinstance(node, yaml_nodes.Mapping) else yaml_nodes.Mapping((), where)
    return below.put(path[0], _put(below.get(path[0]), path[1:], value, where), where)


def _check_variables(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    for name in spec.env:
        if name in OWN_VARIABLES:
            yield f"env.{name}", "psctl sets this variable itself", "leave it out"
        if name in spec.secrets:
            yield f"env.{name}", "is under secrets too", "keep it under secrets alone"


def _check_script(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    if spec.script is None and spec.module is None:
        yield "script", "missing", "write script: train.py, or module: pkg.train"
    if spec.script is not None and spec.module is not None:
        yield "module", f"script: {spec.script} is given too", "keep one of script and module"
    if spec.script is not None:
        plain = posixpath.normpath(spec.script)
        if plain.startswith(("/", "~", "../")) or plain in (".", ".."):
            yield (
                "script",
                f"{spec.script} is outside workdir, the folder that is sent to the hosts",
                "write it relative to workdir",
            )


def _check_groups(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    if spec.groups and spec.servers == 0:
        yield "servers", "0, but groups read from servers", "servers: auto, or no groups"
    yield from check_groups(spec.groups, asynchronous=spec.sync.consistency == "asp")


def _check_workers(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Bounds of an elastic number of workers that exclude every number."""
    workers = spec.workers
    if isinstance(workers, Elastic) and workers.min > workers.max:
        yield "workers.min", f"{workers.min} is more than max, {workers.max}", f"min: {workers.max}, or less"


def _check_filters(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Entries of filters without a filter or with several, and filters that may send no element."""
    seen: set[str] = set()
    for index, each in enumerate(spec.sync.filters):
        named = [name for name in each.__struct_fields__ if getattr(each, name) is not None]
        where = f"sync.filters[{index}]"
        if len(named) != 1:
            yield where, f"{len(named)} filters in one entry", "one an entry: [{random_skip: 0.5}, {significance: 0.5}]"
        for name in named:
            if name in seen:
                yield f"{where}.{name}", "is given twice", "keep one"
            seen.add(name)
            if getattr(each, name) == 1:
                yield f"{where}.{name}", "with 1 no element may be sent", "a number below 1, such as 0.5"


def _check_strategy(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Settings that the strategy does not support."""
    sync, strategy = spec.sync, spec.sync.strategy
    if strategy == "ps" and spec.servers == 0:
        yield "servers", "0, but strategy: ps needs at least one", "servers: auto, or another strategy"
    if spec.servers == 0 and isinstance(spec.replicas, int) and spec.replicas > 0:
        yield "replicas", f"{spec.replicas}, but there are no servers to hold them", "replicas: auto"
    if sync.consistency != "bsp" and sync.update == "worker":
        yield (
            "sync.update",
            f"worker cannot be combined with consistency: {_mode(sync.consistency)}: then only servers step",
            "update: server, or consistency: bsp",
        )
    if sync.period > 1 and sync.update == "server":
        yield (
            "sync.update",
            f"server cannot be combined with period: {sync.period}: workers step alone within a period",
            "update: worker, or period: 1",
        )
    if sync.period > 1 and sync.consistency != "bsp":
        yield (
            "sync.period",
            f"{sync.period} cannot be combined with consistency: {_mode(sync.consistency)}: all synchronise at its end",
            "consistency: bsp, or period: 1",
        )
    if sync.update == "sharded":
        yield from _check_sharded(spec)
    if sync.step_in_backward:
        yield from _check_step_in_backward(sync)
    if sync.sums == "rack":
        yield from _check_racks(sync)
    if sync.factor_rows is not None:
        yield from _check_factors(sync)
    if sync.bucket is not None:
        yield from _check_bucket(sync)
    if sync.replan and (strategy != AUTO or spec.groups):
        why = f"strategy: {strategy}" if strategy != AUTO else "groups, which read servers: the strategy is ps"
        yield (
            "sync.replan",
            f"true cannot be combined with {why}",
            "remove replan, or use strategy: auto without groups",
        )
    on_servers = _only_on_servers(sync)
    if spec.servers == 0 and on_servers:
        yield on_servers, f"needs servers ({sync.compressed}), but servers: 0 is given", "servers: auto, or none"
    if strategy in ("ps", AUTO):
        return
    cure = "use strategy: ps, or auto"
    if sync.consistency != "bsp":
        mode = _mode(sync.consistency)
        yield "sync.consistency", f"{mode} cannot be combined with strategy: {strategy}, which is bsp", cure
    if sync.update == "server":
        yield "sync.update", f"server cannot be combined with strategy: {strategy}, which has no servers", cure
    if on_servers:
        what = "filters" if on_servers == "sync.filters" else sync.compressed.kind
        text = f"{what} cannot be combined with strategy: {strategy} (compression: none, bf16, fp16 can)"
        yield on_servers, text, cure
    if isinstance(spec.replicas, int) and spec.replicas > 0:
        yield "replicas", f"{spec.replicas} cannot be combined with strategy: {strategy}, which has no servers", cure


def _check_sharded(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Settings under which ranks cannot each step a part of the parameters, between the halves of a collective."""
    sync, strategy = spec.sync, spec.sync.strategy
    dense = sync.compression in ("none", "bf16", "fp16") and not sync.filters
    known = ", ".join(types.DIVISIBLE)
    refused = {
        f"strategy: {strategy}": (strategy not in (AUTO, *types.DIVISIBLE), f"strategy: auto, or one of {known}"),
        f"consistency: {_mode(sync.consistency)}": (sync.consistency != "bsp", "consistency: bsp"),
        f"period: {sync.period}": (sync.period > 1, "period: 1"),
        f"compression: {sync.compressed.kind}": (not dense and not sync.filters, "compression: none, bf16 or fp16"),
        "filters": (bool(sync.filters), "no filters"),
        "factor_rows": (sync.factor_rows is not None, "no factor_rows"),
        f"bucket: {AUTO}": (sync.bucket == AUTO, "a size, or no bucket"),
        f"servers: {spec.servers}": (strategy == AUTO and spec.servers not in (AUTO, 0), "servers: auto"),
        f"replicas: {spec.replicas}": (isinstance(spec.replicas, int) and spec.replicas > 0, "replicas: auto"),
        "groups": (bool(spec.groups), "no groups"),
    }
    for other, (given, cure) in refused.items():
        if given:
            text = (
                f"sharded cannot be combined with {other}: workers step parts of one joint gradient, summed among them"
            )
            yield "sync.update", text, f"{cure}, or update: auto"


def _check_step_in_backward(sync: SyncSpec) -> Iterator[tuple[str, str, str]]:
    """Settings under which no part of the parameters steps before backward has ended."""
    if sync.update not in ("sharded", "server"):
        yield (
            "sync.step_in_backward",
            f"true cannot be combined with update: {sync.update}: only servers and sharded optimizers step then",
            "use update: sharded or update: server, or leave out step_in_backward",
        )
    elif sync.consistency != "bsp":
        yield (
            "sync.step_in_backward",
            f"true cannot be combined with consistency: {_mode(sync.consistency)}: no worker waits for these values",
            "use consistency: bsp, or leave out step_in_backward",
        )
    elif sync.strategy == "native":
        yield (
            "sync.step_in_backward",
            "true cannot be combined with strategy: native, whose sums are the engine's own",
            "use strategy: auto, or leave out step_in_backward",
        )


def _check_batchnorm(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Settings under which workers are not all in the same forward."""
    if spec.sync.batchnorm == "local":
        return
    refused = {
        f"consistency: {_mode(spec.sync.consistency)}": (spec.sync.consistency != "bsp", "consistency: bsp"),
        "restart.on_worker_loss: continue": (spec.restart.on_worker_loss == "continue", "on_worker_loss: wait"),
    }
    for other, (given, cure) in refused.items():
        if given:
            text = f"sync cannot be combined with {other}: every layer's statistics need all workers, in the same step"
            yield "sync.batchnorm", text, f"{cure}, or batchnorm: local"


def _check_racks(sync: SyncSpec) -> Iterator[tuple[str, str, str]]:
    """Settings under which there are no sums by rack."""
    refused = {
        f"strategy: {sync.strategy}": (sync.strategy != "ps", "strategy: ps"),
        f"consistency: {_mode(sync.consistency)}": (sync.consistency != "bsp", "consistency: bsp"),
        f"compression: {sync.compressed.kind}": (sync.compression != "none", "compression: none"),
        "filters": (bool(sync.filters), "no filters"),
    }
    for other, (given, cure) in refused.items():
        if given:
            text = f"rack cannot be combined with {other}: servers sum gradients of racks, in step, as they are"
            yield "sync.sums", text, f"{cure}, or sums: auto"


def _check_factors(sync: SyncSpec) -> Iterator[tuple[str, str, str]]:
    """Settings under which gradients are not summed at every step as they are, by a collective."""
    refused = {
        "strategy: ps": sync.strategy == "ps",
        f"consistency: {_mode(sync.consistency)}": sync.consistency != "bsp",
        "update: server": sync.update == "server",
        f"period: {sync.period}": sync.period > 1,
        f"compression: {sync.compressed.kind}": sync.compression != "none",
        "filters": bool(sync.filters),
    }
    for other in (name for name, given in refused.items() if given):
        yield (
            "sync.factor_rows",
            f"{sync.factor_rows} cannot be combined with {other}: collectives send factors, at every step, as they are",
            f"leave out factor_rows, or {other}",
        )


def _check_bucket(sync: SyncSpec) -> Iterator[tuple[str, str, str]]:
    """Settings under which there are no buckets, or none that can be measured at every step."""
    shown = units.format_bytes(sync.bucket) if isinstance(sync.bucket, int) else AUTO
    refused = {
        "strategy: ps": sync.strategy == "ps",
        f"consistency: {_mode(sync.consistency)}": sync.consistency != "bsp",
        "update: server": sync.update == "server",
    }
    for other in (name for name, given in refused.items() if given):
        yield (
            "sync.bucket",
            f"{shown} cannot be combined with {other}: gradients go to servers by shard",
            f"leave out bucket, or {other}",
        )
    if sync.bucket == AUTO and sync.period > 1:
        yield (
            "sync.bucket",
            f"{AUTO} cannot be combined with period: {sync.period}: between two sums several steps are made",
            "give a size, or period: 1",
        )


def _check_share(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Settings with which examples cannot be shared by speed."""
    if spec.loader.share != "speed":
        return
    if spec.sync.consistency == "asp":
        yield (
            "loader.share",
            "speed cannot be combined with consistency: asp, under which fast workers take more steps",
            "share: even, or consistency: bsp",
        )
    if spec.sync.factor_rows is not None:
        yield (
            "loader.share",
            f"speed cannot be combined with factor_rows: {spec.sync.factor_rows}, the most examples of a worker",
            "share: even, or leave out factor_rows",
        )


def _only_on_servers(sync: SyncSpec) -> str:
    """Return the key of a compression that only servers support; "" where collectives support it too."""
    if sync.compression not in ("none", "bf16", "fp16"):
        return "sync.compression"
    return "sync.filters" if sync.filters else ""


def _mode(consistency: str | Ssp) -> str:
    return f"{{ssp: {consistency.ssp}}}" if isinstance(consistency, Ssp) else consistency


_CONTRADICTIONS: dict[tuple[str, ...], Callable[[JobSpec], Iterator[tuple[str, str, str]]]] = {
    ("script", "module"): _check_script,
    ("workers",): _check_workers,
    ("data",): lambda spec: check_data(spec.data),
    ("groups", "servers", "sync"): _check_groups,
    ("outputs",): lambda spec: check_outputs(spec.outputs),
    ("sync",): _check_filters,
    ("sync", "servers", "replicas"): _check_strategy,
    ("sync", "restart"): _check_batchnorm,
    ("loader", "sync"): _check_share,
    ("env", "secrets"): _check_variables,
}
"""Checks for contradictions, which yield (path, message, hint), by the keys that they compare."""
