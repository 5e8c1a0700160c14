"""The choice of a strategy, with every candidate and the reason.

Candidates within TIE of the fastest count as equal, because predictions are no more precise. On GPUs, where NCCL
carries psctl's schedules too, the engine's own all-reduce is preferred among these, then `ps`, then the fastest of the
others. On CPUs `ps` is preferred, then the fastest that psctl's own connections carry; the engine's own (Gloo, neither
encrypted nor authenticated) is chosen only where all others are slower. Where the compute of a step is known, whole
steps are compared: compute, and what it does not hide of the synchronisation (summed_steps.py, served_steps.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from psctl.errors import UsageError
from psctl.job.events import PlanCandidate, Planned
from psctl.orders import HostOrder, JobOrder
from psctl.plan.candidates import TIE, CandidateSearch, Predicted, options_as_data
from psctl.plan.collective_choice import ChosenAlgorithm, CollectivePlanner
from psctl.plan.factor_layers import factored_layers, operations_per_second
from psctl.plan.feasibility import ONE_WORKER, Feasibility
from psctl.plan.in_network import InNetwork, in_network
from psctl.plan.overlap import StepTime
from psctl.plan.plan_input import PlanInput, PlanRequest, plan_input_of_job, request_of_job
from psctl.plan.reasons import bottleneck, channel, reason
from psctl.plan.served_steps import ServedSteps, ServerTiming
from psctl.plan.step_terms import StepTerm, schedule_terms
from psctl.plan.summed_steps import SummedSteps, options_as_played
from psctl.schedule.algorithms import catalog
from psctl.types import STRATEGIES, Layout
from psctl.units import format_bytes, format_seconds

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of the types that gradients have."""

ROUNDING = 1 + 1e-6
"""Tolerance for rounding."""

PREFERRED = {True: ("native", "ps"), False: ("ps",)}
"""Strategies preferred among equal predictions, before the fastest: on GPUs (True), and on CPUs, where `native` is
last."""

UNKNOWN = 100_000_000
"""Bytes of gradients that a plan assumes when their number is not known."""

BY_RACK = "; gradients are summed in each rack, and cross between racks once"

IN_PARTS = "; each worker steps a part of the parameters"


class Plan(msgspec.Struct, frozen=True):
    """How gradients are synchronised and why.

    `servers` has the host index of each server, empty unless `chosen` is ps. `size` is bytes of gradients a worker.
    `options` are those of the chosen schedule (`catalog.ScheduleOptions` as plain data, without the defaults);
    empty for native and ps. `factors`: weights of linear layers whose gradients are sent as factors. `start`: the
    broadcast of start values, where it is faster than a sum. `racks`: of each host, where `ps` sums by rack.
    """

    size: int
    world: int
    chosen: str
    update: str
    servers: list[int]
    reason: str
    decided: bool
    candidates: list[PlanCandidate]
    options: dict[str, object] = {}
    factors: tuple[str, ...] = ()
    start: ChosenAlgorithm | None = None
    racks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The predicted time of the chosen strategy."""
        return next((each.seconds for each in self.candidates if each.strategy == self.chosen), None)

    def event(self, time: float) -> Planned:
        """Return the plan as the event of the job's log."""
        return Planned(
            time=time, size=self.size, world=self.world, chosen=self.chosen, reason=self.reason,
            decided=self.decided, candidates=self.candidates, factors=list(self.factors),
        )  # fmt: skip


def gradient_bytes(layout: Layout) -> int:
    """Return the bytes of one worker's gradients."""
    return sum(each.size * WIDTHS.get(each.dtype, 4) for each in layout.parameters if each.trainable)


def choose(
    order: JobOrder, size: int | None, layout: Layout | None, decided: bool, on_gpus: bool | None = None,
    *, hooked: bool = False, in_parts: bool = True,
) -> Plan:  # fmt: skip
    """Choose the strategy of a job.

    Args:
        order: the job with its hosts and the user's request (`strategy`, `update`, `servers`).
        size: bytes of gradients a worker; None takes the layout's, or the job's own `size`, or 100 MB.
        layout: that of `prepare`; None before the run.
        decided: whether this is the run's own decision.
        on_gpus: whether parameters lie on GPUs; None: as the machines suggest.
        hooked: gradients come from DistributedDataParallel.
        in_parts: `update: auto` may have each worker step a part of the parameters.

    Returns:
        the plan: all candidates, best first, every strategy's name once.

    Raises:
        UsageError: the requested strategy is not possible here; the message has the reason.
    """
    known = size if size is not None else gradient_bytes(layout) if layout is not None else order.size
    request = request_of_job(order, layout)
    request = msgspec.structs.replace(
        request, on_gpus=on_gpus, hooked=hooked, in_parts=in_parts and request.in_parts
    )  # fmt: skip
    inputs = plan_input_of_job(order)
    planner = Planner(inputs, order.hosts, request)
    plan = planner.plan(known if known is not None else UNKNOWN, decided)
    if decided and layout is not None and not planner.on_gpus:
        plan = _with_start(inputs, plan, layout)
    if hooked and order.bucket is not None:
        raise UsageError(
            "sync.bucket with gradients from DistributedDataParallel (psctl.accelerate_ddp), which makes the buckets",
            "leave bucket out, and give DistributedDataParallel bucket_cap_mb=; or use run.prepare",
        )
    if order.factor_rows is None or layout is None or planner.world == 1:
        return plan
    if hooked:
        raise UsageError(
            "sync.factor_rows with gradients from DistributedDataParallel (psctl.accelerate_ddp), which come without "
            "their factors",
            "leave factor_rows out, or use run.prepare",
        )
    return _with_factors(planner, plan, order, layout, decided=decided)


def _with_start(inputs: PlanInput, plan: Plan, layout: Layout) -> Plan:
    """Return the plan of sums on hosts with the broadcast of start values, where one is faster than a sum."""
    if plan.chosen in ("ps", "native") or inputs.world == 1 or not plan.size or plan.seconds is None:
        return plan
    size = sum(each.size * WIDTHS.get(each.dtype, 4) for each in layout.parameters)
    schedule = catalog.build(plan.chosen, inputs.world, msgspec.convert(plan.options, catalog.ScheduleOptions))
    start = CollectivePlanner(inputs).broadcast_within(schedule, size, plan.seconds * size / plan.size)
    return msgspec.structs.replace(plan, start=start)


def _with_factors(planner: Planner, plan: Plan, order: JobOrder, layout: Layout, *, decided: bool) -> Plan:
    """Return the plan in which gradients of linear layers are sent as factors where that takes less time."""
    assert order.factor_rows is not None, "else there are none"
    summed = [each for each in plan.candidates if each.feasible and each.seconds and each.strategy != "ps"]
    if not summed or not plan.size:
        return plan
    width = max((WIDTHS.get(each.dtype, 4) for each in layout.parameters if each.linear), default=4)
    pace = next((each for each in summed if each.strategy == plan.chosen), summed[0]).seconds or 0.0
    operations = operations_per_second(order.hosts, on_gpus=planner.on_gpus)
    found = factored_layers(layout, planner.world, order.factor_rows, width, pace / plan.size, operations)
    if not found.names:
        return plan
    other = planner.plan(plan.size, decided, found.dense - found.factors)
    if other.chosen == "ps":
        return other
    what = f"{len(found.names)} linear layer{'s' * (len(found.names) > 1)}"
    sent = f"; gradients of {what} are sent as factors: {format_bytes(found.factors)} for {format_bytes(found.dense)}"
    return msgspec.structs.replace(other, factors=found.names, reason=other.reason + sent)


def planner_for_job(order: JobOrder) -> Planner:
    """Return the planner of a job before it runs."""
    return Planner(plan_input_of_job(order), order.hosts, request_of_job(order, None))


def planner_for_cluster(inputs: PlanInput, request: PlanRequest) -> Planner:
    """Return the planner of a cluster that is known only as a graph."""
    hosts = [
        HostOrder(
            name=host.name, address="", interface="", cores=0, gpus=len(host.graph.of_kind("gpu")),
            workers=inputs.hosts.count(host.name), may_serve="server" in host.roles,
        )
        for host in inputs.cluster.hosts
    ]  # fmt: skip
    return Planner(inputs, hosts, request)


class Winner(msgspec.Struct, frozen=True):
    """The strategy chosen for a size, and its predicted seconds."""

    size: int
    chosen: str
    seconds: float | None


def _time_of(row: PlanCandidate) -> tuple[float, float]:
    """Return by what a candidate is compared: the time of a step, where it is known, then that of its
    synchronisation."""
    own = row.seconds or 0.0
    return (own if row.step_seconds is None else row.step_seconds), own


def _times(step: StepTime | None) -> tuple[float | None, float | None]:
    return (None, None) if step is None else (round(step.seconds, 9), round(step.hidden, 9))


def _impossible(strategy: str, why: str | None) -> UsageError:
    return UsageError(f"strategy: {strategy} is not possible here: {why}", hint="strategy: auto")


class Planner:
    """Chooses strategies on given machines.

    Args:
        inputs: machines, ranks, costs.
        hosts: the roster, to place servers on.
        request: of the job file and the model.
    """

    def __init__(self, inputs: PlanInput, hosts: Sequence[HostOrder], request: PlanRequest) -> None:
        self._inputs, self._hosts, self._request = inputs, hosts, request
        self._gpus = inputs.gpus if request.on_gpus is None else request.on_gpus
        self._search = CandidateSearch(inputs)
        self._summed, self._served = SummedSteps(inputs, request), ServedSteps(inputs, hosts, request)
        self._feasibility = Feasibility(inputs, request, self._search.why_not, on_gpus=self._gpus)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._inputs.world

    @property
    def on_gpus(self) -> bool:
        """Whether gradients are on GPUs."""
        return self._gpus

    def in_network(self, size: int) -> InNetwork | None:
        """Return the time of sums in the network's switches, to compare with; None where they cannot."""
        return in_network(self._inputs, size * self._request.halved)

    @property
    def compares_steps(self) -> bool:
        """Whether the compute of a step is known, so that whole steps are compared."""
        return self._request.compute is not None

    def plan(self, size: int, decided: bool = False, spared: int = 0, *, whole: bool = True) -> Plan:
        """Return the plan for a number of bytes.

        Args:
            size: bytes of gradients a worker.
            decided: whether this is the run's own decision.
            spared: bytes that collectives need not send, because factors of gradients are sent in their place.
            whole: predict every strategy; else the times of those that cannot be chosen are estimates.

        Raises:
            UsageError: the requested strategy is not possible here.
        """
        ps = self._served.timing(size)
        summed = size - spared
        found = self._predicted(
            [name for name in STRATEGIES if self._feasibility.why_not(name, ps.servers) is None], summed, whole=whole
        )
        rows = [self._candidate(name, found.get(name), summed, ps) for name in STRATEGIES]
        rows.sort(key=lambda row: (not row.feasible, *_time_of(row)))
        chosen = self._choose(rows)
        rows.sort(key=lambda row: (not row.feasible, row.strategy != chosen and self._request.strategy == "auto"))
        own = found.get(chosen) if chosen != "native" else None  # the engine takes no options
        update = str(next(row.params.get("update", "worker") for row in rows if row.strategy == chosen))
        return Plan(
            size=size, world=self._inputs.world, chosen=chosen, update=update,
            servers=ps.servers if chosen == "ps" else [], decided=decided, candidates=rows,
            racks=self._served.racks() if chosen == "ps" and ps.by_rack else (),
            reason=self._reason(chosen, rows, ps.servers) + (BY_RACK if chosen == "ps" and ps.by_rack else "")
            + (IN_PARTS if update == "sharded" else ""),
            options=options_as_data(options_as_played(own, update)) if own is not None else {},
        )  # fmt: skip

    def check(self) -> None:
        """Refuse a strategy that was requested by name and is impossible here, without timing any.

        Raises:
            UsageError: it is impossible; the message has the reason.
        """
        wanted = self._request.strategy
        why = self._feasibility.why_not(wanted, self._served.default_servers) if wanted != "auto" else None
        if why not in (None, ONE_WORKER):
            raise _impossible(wanted, why)

    def winner(self, size: int) -> Winner:
        """Return the choice of `plan` for a size, timing only strategies that can win.

        With many ranks times are stepwise estimates, so of nearly equal strategies another one may be chosen.

        Raises:
            UsageError: the requested strategy is not possible here.
        """
        possible = [
            name for name in STRATEGIES if self._feasibility.why_not(name, self._served.default_servers) is None
        ]
        if self._request.strategy in possible:
            return Winner(size, self._request.strategy, self._seconds(self._request.strategy, size))
        if self._request.strategy != "auto" or not possible or self._inputs.world == 1:
            plan = self.plan(size)
            return Winner(size, plan.chosen, plan.seconds)
        least = {name: self._least(name, size) for name in possible}
        timed: dict[str, float] = {}
        for name in sorted(possible, key=lambda name: least[name]):
            if least[name] <= min(timed.values(), default=math.inf) * ROUNDING:
                timed[name] = self._seconds(name, size)
        limit = TIE * min(timed.values())
        last = not self._gpus and min(timed, key=lambda name: timed[name]) == "native"
        for name in possible if last else PREFERRED[self._gpus]:
            if name in possible and name not in timed and least[name] <= limit:
                timed[name] = self._seconds(name, size)
        chosen = self._preferred([(name, timed[name]) for name in STRATEGIES if name in timed])
        return Winner(size, chosen, timed[chosen])

    def _least(self, name: str, size: int) -> float:
        if name == "ps":
            return self._served.least_seconds(size)
        part = self._summed.largest(size)
        known = self._search.known_estimate(name, part)
        least = known[0] if known is not None else self._search.least_seconds(name, part)
        return least * size * self._request.halved / max(1, part)

    def _seconds(self, name: str, size: int) -> float:
        if name == "ps":
            return self._served.timing(size).seconds
        return self._summed.total(*self._search.quick_estimate(name, self._summed.largest(size)), size)

    def terms(self, name: str, size: int) -> list[StepTerm]:
        """Return the terms of a step's time with this strategy, as if nothing overlapped.

        Raises:
            UsageError: the strategy is not possible here.
        """
        ps = self._served.timing(size)
        why_not = self._feasibility.why_not(name, ps.servers)
        if why_not is not None:
            raise _impossible(name, why_not)
        if name == "ps":
            return self._served.terms(size, ps, on_gpus=self._gpus)
        found, count = self._predicted([name], size, whole=False)[name], len(self._summed.buckets(size))
        moved = self._summed.total(found.seconds, found.timing.waiting, size) - found.timing.waiting * count
        return schedule_terms(self._request.compute, found.timing, moved, count)

    def _predicted(self, names: Sequence[str], size: int, *, whole: bool) -> dict[str, Predicted]:
        """Return the best prediction of each strategy for the largest bucket; with many ranks, or unless `whole`, those
        that cannot be chosen are only estimated step by step."""
        part, wanted = self._summed.largest(size), self._request.strategy
        if whole and not self._search.prunes:
            return {name: self._search.best(name, part) for name in names if name != "ps"}
        least = {name: self._search.least_seconds(name, part) for name in names if name != "ps"}
        found: dict[str, Predicted] = {}
        limit = math.inf
        for name in sorted(least, key=lambda name: least[name]):
            shown = name == "native" and not self._search.prunes  # reasons name what it waits for
            timed = least[name] <= limit or name == wanted or shown
            found[name] = self._search.best(name, part) if timed else self._search.estimate(name, part)
            limit = min(limit, TIE * ROUNDING * found[name].seconds) if timed else limit
        return found

    def _candidate(self, name: str, found: Predicted | None, size: int, ps: ServerTiming) -> PlanCandidate:
        why_not = self._feasibility.why_not(name, ps.servers)
        if why_not is not None:
            return PlanCandidate(name, {}, None, None, None, None, False, why_not)
        if found is None:
            names = self._served.names(ps)
            params: dict[str, object] = {
                "servers": len(names),
                "hosts": names,
                "update": ps.update,
            } | self._compression_parameter
            if ps.by_rack:
                params["sums"] = "by rack"
            where, step = bottleneck(ps.timing), self._served.step(size, ps)
            return PlanCandidate(name, params, ps.seconds, ps.steps, ps.sent, where, True, None, *_times(step))
        sent = found.bytes_per_rank * size / max(self._summed.buckets(size)) if size else 0.0
        update, step = self._summed.step(found, size)
        buckets = {"buckets": len(self._summed.buckets(size, update))} if self._request.bucketed else {}
        params = options_as_data(options_as_played(found, update)) | buckets | self._compression_parameter
        params |= {"update": update} if update == "sharded" else {}
        where, total = bottleneck(found.timing), self._summed.total(found.seconds, found.timing.waiting, size)
        return PlanCandidate(name, params, total, found.steps, sent, where, True, None, *_times(step))

    @property
    def _compression_parameter(self) -> dict[str, str]:
        """The parameter of a candidate that names the compression."""
        return {} if self._request.compression.off else {"compression": str(self._request.compression)}

    def _choose(self, rows: Sequence[PlanCandidate]) -> str:
        """Return the chosen name; `rows` are sorted by time."""
        by_name = {row.strategy: row for row in rows}
        wanted = self._request.strategy
        if wanted != "auto":
            row = by_name[wanted]
            if row.feasible:
                return wanted
            if row.why_not == ONE_WORKER:
                return "native"
            raise _impossible(wanted, row.why_not)
        feasible = [row for row in rows if row.feasible and row.seconds is not None]
        if not feasible:
            raise UsageError(f"no strategy supports the request: {rows[0].why_not}", hint="servers: auto")
        if self._inputs.world == 1 and by_name["native"].feasible:
            return "native"
        return self._preferred([(row.strategy, _time_of(row)[0]) for row in feasible])

    def _reason(self, chosen: str, rows: Sequence[PlanCandidate], servers: Sequence[int]) -> str:
        if self._inputs.world == 1 and chosen == "native":
            return f"strategy: {chosen} is requested" if self._request.strategy == chosen else ONE_WORKER
        hosts = [*self._inputs.hosts, *(self._hosts[at].name for at in servers if chosen == "ps")]
        carried = channel(chosen, hosts, gpus=self._gpus, sealed=self._request.sealed)
        if self._request.strategy != "auto" and self._request.strategy == chosen:
            taken = f"sync.replan took {chosen}, when the first steps had been measured"
            return (taken if self._request.replan else f"strategy: {chosen} is requested") + carried
        if self._request.compute is None:
            return reason(chosen, rows) + carried
        steps = [msgspec.structs.replace(row, seconds=row.step_seconds) for row in rows]
        whole = f"; times are of a step with {format_seconds(self._request.compute)} of compute"
        return reason(chosen, steps) + whole + carried

    def _preferred(self, timed: Sequence[tuple[str, float]]) -> str:
        """Return the preferred one of those within TIE of the fastest, else the fastest."""
        least = min(seconds for _, seconds in timed)
        equal = sorted((seconds, place, name) for place, (name, seconds) in enumerate(timed) if seconds <= TIE * least)
        names = [name for _, _, name in equal]
        last = "" if self._gpus else "native"
        names.sort(key=lambda name: name == last)
        return next((name for name in PREFERRED[self._gpus] if name in names), names[0])
