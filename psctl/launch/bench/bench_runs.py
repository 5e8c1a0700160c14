"""`psctl bench`: makes jobs from its options, or for `up`, and results and winners from the measured times.

All collectives of all sizes are one job. Parameter servers are cut for one model, so `ps` is one job a size; `up`
measures it at the smallest size, where its messages count most, at the end of the job of the collectives.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from psctl import errors
from psctl.job.bench_messages import (
    FILE,
    OPERATIONS,
    BenchEffort,
    BenchQuestion,
    BenchRound,
    BenchRow,
    CollectiveOperation,
    Operation,
    collective_of,
)
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.jobs.prepare import RequestedJob, job_hosts_of, load_requested_job
from psctl.launch.measure.calibration import MeasuredSum
from psctl.launch.placement.job_planning import order_for_plan
from psctl.orders import JobOrder
from psctl.plan.candidates import options_as_data
from psctl.plan.choose import Plan, Planner
from psctl.plan.collective_choice import CollectivePlanner, CollectivePrediction
from psctl.plan.plan_input import PlanInput, PlanRequest, plan_input_of_job
from psctl.schedule.algorithms.collectives import ALGORITHMS
from psctl.types import STRATEGIES, JsonObject
from psctl.units import parse_size

NAME = "bench"
"""The name of the jobs: bench-1, bench-2 ..."""

SMALLEST, LARGEST = 1_000, 256_000_000
"""The default range of sizes, in bytes."""

FACTOR = 4
"""From one size to the next."""


class LikelyStrategies(msgspec.Struct, frozen=True):
    """The strategies of a size that may be the fastest, by their predictions.

    Args:
        factor: times the fastest prediction, up to which a strategy may be the fastest in fact.
        seconds: limit of the predicted seconds of all of them together, for OPERATIONS of each; the first three are
            always measured.
    """

    factor: float
    seconds: float

    def among(self, predicted: Mapping[str, float]) -> list[str]:
        """Return the names, fastest first, of predictions in seconds."""
        found: list[str] = []
        spent = 0.0
        for name in sorted(predicted, key=lambda name: predicted[name]):
            spent += OPERATIONS * predicted[name]
            if predicted[name] > self.factor * min(predicted.values()) or (len(found) >= 3 and spent > self.seconds):
                break
            found.append(name)
        return found


class BenchRequest(msgspec.Struct, frozen=True):
    """What to measure. `strategies` empty: all feasible ones, or of these the `likely`; `controls`: of congestion, to
    compare; `effort`: how often and how long; `limit`: of a job's whole time; `part_bytes`: the largest size that a
    part of the ranks measures once more."""

    operation: Operation
    sizes: list[int]
    strategies: list[str]
    workers: str | None = None
    servers: str | None = None
    controls: list[str] = []
    effort: BenchEffort = BenchEffort()
    limit: str = "null"
    likely: LikelyStrategies | None = None
    part_bytes: int = 0


class BenchJob(msgspec.Struct, frozen=True):
    """One job of a bench: its question, the strategy under which it runs, and its servers; None: as requested."""

    question: BenchQuestion
    strategy: Literal["native", "ps", "auto"]
    servers: str | None = None


class BenchResult(msgspec.Struct, frozen=True):
    """One strategy at one size."""

    row: BenchRow
    predicted: float | None

    @property
    def median(self) -> float:
        """The middle of its times."""
        return statistics.median(self.row.times)

    @property
    def valid(self) -> bool:
        """Whether its times may be used: the sums were correct."""
        return self.row.correct and self.median > 0

    def document(self) -> JsonObject:
        """Return the record of `bench -o json`."""
        row = self.row
        algbw = row.bytes / self.median if self.median else 0.0
        return {
            "operation": row.operation, "strategy": row.strategy, "bytes": row.bytes, "world": row.world,
            "seconds": {"min": min(row.times), "median": self.median, "max": max(row.times)},
            "algbw": algbw, "busbw": algbw * bus_factor(row.operation, row.world),
            "predicted_seconds": self.predicted, "correct": row.correct,
        }  # fmt: skip


def bus_factor(operation: Operation, world: int) -> float:
    """Return what turns bytes/s of the vector into bytes/s that a rank's link carries in each direction.

    As nccl-tests counts: an all-reduce sends 2 (n-1)/n of the vector from each rank at least, a broadcast or a reduce
    all of it through every link, the other collectives (n-1)/n. A push and a pull send all of it once each way.
    """
    if operation in ("pushpull", "broadcast", "reduce"):
        return 1.0
    return (2 if operation == "allreduce" else 1) * (world - 1) / world


# ---- options and jobs ------------------------------------------------------------------------------------------------


def sizes_of(text: str | None) -> list[int]:
    """Read --sizes: `A:B` (by powers of four, B included), or a list `A,B,C`.

    Raises:
        UsageError: it is neither, or a size has less than one float32.
    """
    given = text or f"{SMALLEST}B:{LARGEST}B"
    first, colon, last = given.partition(":")
    try:
        found = [parse_size(each.strip()) for each in ([first, last] if colon else given.split(","))]
    except ValueError as error:
        raise errors.UsageError(f"--sizes {error}", hint="such as --sizes 1KB:256MB or --sizes 1MB,25MB") from None
    if min(found) < 4 or (colon and found[0] > found[1]):
        what = "the first is the larger one" if min(found) >= 4 else "a vector has 4 bytes at least"
        raise errors.UsageError(f"--sizes {given}: {what}", hint="such as --sizes 1KB:256MB or --sizes 1MB,25MB")
    if colon:
        low, high = found
        found = [low * FACTOR**power for power in range(64) if low * FACTOR**power < high] + [high]
    return sorted({size // 4 * 4 for size in found})


def strategies_of(text: str | None, operation: Operation) -> list[str]:
    """Read --strategy: `all` or names. Empty: all.

    Raises:
        UsageError: a name is unknown, or it is no strategy of pushpull.
    """
    names = [] if text in (None, "all") else [name.strip() for name in str(text).split(",")]
    if (collective := collective_of(operation)) is not None:
        known = ("native", *ALGORITHMS[collective])
        for name in names:
            if name not in known:
                raise errors.UsageError(
                    f"--strategy {name}: no way of {operation}", hint=f"all, or of: {', '.join(known)}"
                )
        return list(dict.fromkeys(names))
    for name in names:
        if name not in STRATEGIES:
            raise errors.UsageError(f"--strategy {name}: unknown", hint=f"all, or of these: {', '.join(STRATEGIES)}")
        if operation == "pushpull" and name != "ps":
            raise errors.UsageError(f"--strategy {name}: pushpull measures servers", hint="ps, or leave it out")
    return ["ps"] if operation == "pushpull" else list(dict.fromkeys(names))


def plan_of(reached: ReachedCluster, bench_request: BenchRequest) -> BenchPlan:
    """Return the predictions for a bench's workers, and all hosts that may serve."""
    with tempfile.TemporaryDirectory(prefix="psctl-bench-") as folder:
        job = wanted(Path(folder), bench_request, BenchJob(BenchQuestion(bench_request.operation, []), "auto"))
    return BenchPlan(reached, job, bench_request.operation)


def wanted(folder: Path, bench_request: BenchRequest, job: BenchJob) -> RequestedJob:
    """Write a job's folder and return the job in the form of a user's request.

    Args:
        folder: an empty one; the question goes there.
        bench_request: the command line.
        job: what is to be measured.
    """
    (folder / FILE).write_bytes(msgspec.json.encode(job.question))
    lines = [
        "version: 1", f"name: {NAME}", "module: psctl.worker.bench_script", f"args: [{FILE}]",
        "checkpoint: {every: null, on_stop: false}", f"timeouts: {{stall: 30d, total: {bench_request.limit}}}",
        f"sync: {{strategy: {job.strategy}, update: worker}}", "replicas: 0",
    ]  # fmt: skip
    servers = job.servers or bench_request.servers
    given = {"workers": bench_request.workers, "servers": servers if job.strategy != "native" else None}
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load_requested_job("\n".join(lines) + "\n", str(folder / "job.yaml"), overrides, [])


# ---- predictions -----------------------------------------------------------------------------------------------------


class BenchPlan:
    """Plans for the hosts of a bench job.

    Args:
        reached: the hosts.
        wanted: a job with all that may serve.
        operation: what is measured.
    """

    def __init__(self, reached: ReachedCluster, wanted: RequestedJob, operation: Operation = "allreduce") -> None:
        self._collective = collective_of(operation)
        self.order: JobOrder = order_for_plan(reached, NAME, wanted.job, job_hosts_of(reached, wanted.job))
        self.inputs: PlanInput = plan_input_of_job(self.order)
        self._planner = Planner(
            self.inputs,
            self.order.hosts,
            PlanRequest("auto", "worker", self.order.servers, encrypted=self.order.require_encryption),
        )
        self._plans: dict[int, Plan] = {}
        self._collectives = CollectivePlanner(self.inputs)
        self._predictions: dict[int, dict[str, CollectivePrediction]] = {}

    def plan(self, size: int) -> Plan:
        """Return the plan for a vector of so many bytes that travels whole."""
        if size not in self._plans:
            self._plans[size] = self._planner.plan(size)
        return self._plans[size]

    def chosen(self, size: int) -> str:
        """Return what psctl takes for a vector of so many bytes: `auto`'s strategy, or the collective's algorithm."""
        if self._collective is None:
            return self.plan(size).chosen
        return min(self._predicted(size).values(), key=lambda each: each.seconds).algorithm

    def _predicted(self, size: int) -> dict[str, CollectivePrediction]:
        """Return the predictions of a collective's algorithms; of the engine's own there is none."""
        if size not in self._predictions:
            assert self._collective is not None, "strategies have plans"
            whole = size * self.inputs.world if self._collective == "all-to-all" else size
            found = self._collectives.predictions(self._collective, whole)
            self._predictions[size] = {each.algorithm: each for each in found}
        return self._predictions[size]

    def predicted(self, strategy: str, size: int) -> float | None:
        """Return the predicted seconds of a strategy; None where there is no prediction."""
        if self._collective is not None:
            found = self._predicted(size).get(strategy)
            return found.timing.seconds if found is not None and found.timing is not None else None
        return next(row.seconds for row in self.plan(size).candidates if row.strategy == strategy)

    def sum(self, result: BenchResult) -> MeasuredSum:
        """Return a result as it is saved, with the options that its strategy was measured with."""
        row = result.row
        params = next(each.params for each in self.plan(row.bytes).candidates if each.strategy == row.strategy)
        options = params if row.strategy not in ("native", "ps") else {}
        return MeasuredSum(row.strategy, row.bytes, result.median, options, result.predicted)

    def jobs(self, bench_request: BenchRequest, parts: Sequence[BenchPlan] = ()) -> list[BenchJob]:
        """Return the jobs that measure the requested strategies and sizes.

        Args:
            bench_request: the request.
            parts: plans for the first ranks of the job only, which measure the smaller sizes once more.

        Raises:
            UsageError: a named strategy is not possible here; the message has the reason.
        """
        if self._collective is not None:
            return [self._collective_job(self._collective, bench_request)]
        rounds, served = self._rounds(bench_request)
        for part in parts:
            played, _ = part._rounds(bench_request)  # servers are cut for the workers of a whole job
            small = [each for each in played if each.bytes <= bench_request.part_bytes]
            rounds += [msgspec.structs.replace(each, ranks=part.inputs.world) for each in small]
        strategy: Literal["native", "auto"] = "auto" if self.order.require_encryption else "native"
        if served and bench_request.likely is not None:  # a second job would take longer to start than to measure
            last = min(served, key=lambda each: each.bytes)
            return [BenchJob(_question(bench_request, [*rounds, last]), "ps", "1")]  # so few bytes are one shard
        collectives = [BenchJob(_question(bench_request, rounds), strategy)] if rounds else []
        return [*collectives, *(BenchJob(_question(bench_request, [each]), "ps") for each in served)]

    def _rounds(self, bench_request: BenchRequest) -> tuple[list[BenchRound], list[BenchRound]]:
        """Return the measurements of schedules and the engine, and those of servers."""
        rounds: list[BenchRound] = []
        served: list[BenchRound] = []
        for size in bench_request.sizes:
            rows = {row.strategy: row for row in self.plan(size).candidates}
            for name in bench_request.strategies:
                if not rows[name].feasible:
                    raise errors.UsageError(f"--strategy {name}: {rows[name].why_not}", hint="--strategy all leaves it")
            names = [
                name for name in STRATEGIES if rows[name].feasible and name in (bench_request.strategies or STRATEGIES)
            ]
            seconds = {name: rows[name].seconds or 0.0 for name in names}
            if "ps" in names:
                served.append(BenchRound(size, {"ps": {}}))
            if bench_request.likely is not None:  # the engine's costs are fitted to its only strategy, likely or not
                engine = [name for name in names if name == "native"]
                names = list(dict.fromkeys([*bench_request.likely.among(seconds), *engine]))
            played = {name: rows[name].params for name in names if name != "ps"}
            if played:
                rounds.append(BenchRound(size, played))
        return rounds, served

    def _collective_job(self, operation: CollectiveOperation, bench_request: BenchRequest) -> BenchJob:
        """Return the job that measures a collective's algorithms, and the engine's own."""
        rounds = []
        for size in bench_request.sizes:
            rows = {name: each for name, each in self._predicted(size).items() if each.timing is not None}
            for name in bench_request.strategies:
                if name != "native" and name not in rows:
                    raise errors.UsageError(f"--strategy {name}: {self._predicted(size)[name].why_not}")
            names = [name for name in ("native", *rows) if name in (bench_request.strategies or ("native", *rows))]
            played = {name: options_as_data(rows[name].options) if name in rows else {} for name in names}
            rounds.append(BenchRound(size, played))
        return BenchJob(BenchQuestion(operation, rounds), "auto" if self.order.require_encryption else "native")


def _question(bench_request: BenchRequest, rounds: list[BenchRound]) -> BenchQuestion:
    return BenchQuestion(bench_request.operation, rounds, bench_request.effort)


def sizes_document(outlook: BenchPlan, results: Sequence[BenchResult]) -> list[JsonObject]:
    """Return, for each size, the fastest strategy, what `auto` would take, and how much slower that is (regret)."""
    found = []
    for size in dict.fromkeys(each.row.bytes for each in results):
        times = {each.row.strategy: each.median for each in results if each.row.bytes == size and each.row.correct}
        if not times:
            continue
        winner, auto = min(times, key=lambda name: times[name]), outlook.chosen(size)
        found.append(
            {
                "bytes": size, "winner": winner, "auto": auto,
                "regret": times[auto] / times[winner] - 1 if auto in times else None,
            }
        )  # fmt: skip
    return found
