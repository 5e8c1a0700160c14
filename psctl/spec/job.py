"""job.yaml: the script, its workers and servers, the synchronisation of gradients, and the checkpoints."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from psctl import types, units
from psctl.spec import yaml_nodes
from psctl.spec.cluster import VARIABLE
from psctl.spec.data import DataSpec
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
from psctl.spec.groups import GroupSpec
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
