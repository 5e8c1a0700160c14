"""Settings of job.yaml that cannot be combined: each pair with the reason and the cure."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator

from psctl import types, units
from psctl.spec.data import check_data, check_outputs
from psctl.spec.groups import check_groups
from psctl.spec.job import AUTO, OWN_VARIABLES, Elastic, JobSpec, Ssp, SyncSpec


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


CONTRADICTIONS: dict[tuple[str, ...], Callable[[JobSpec], Iterator[tuple[str, str, str]]]] = {
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
