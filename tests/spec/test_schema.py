"""The JSON Schemas say what the loader reads: each key is described, accepted and read into the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from psctl.errors import PsctlError
from psctl.spec.cluster import load_cluster
from psctl.spec.job_file import load_job
from psctl.spec.schema import cluster_schema, job_schema

JOB = {
    "name": "other", "version": "1", "script": "u.py", "module": "pkg.mod", "args": "[a]", "workdir": "src",
    "exclude": "[data]", "cluster": "lab", "workers": "3", "servers": "4", "seed": "5", "replicas": "0",
    "sync.strategy": "native", "sync.consistency": "{ssp: 3}", "sync.consistency.ssp": "4",
    "sync.update": "worker", "sync.period": "8", "sync.sums": "host",
    "sync.compression": "int8", "sync.compression.topk": "0.01", "sync.filters": "[{random_skip: 0.5}]",
    "sync.factor_rows": "64", "sync.bucket": "1MB", "sync.compute": "250ms", "sync.replan": "true",
    "sync.step_in_backward": "true, update: sharded",
    "sync.batchnorm": "sync", "sync.size": "160MB", "checkpoint.to": "/data",
    "checkpoint.every": "10m", "checkpoint.keep": "7", "checkpoint.keep_best.metric": "accuracy",
    "checkpoint.keep_best.mode": "max", "checkpoint.on_stop": "false", "checkpoint.copies": "0",
    "checkpoint.full_every": "1", "loader.share": "speed", "restart.max": "0",
    "restart.wait": "1h", "restart.on_worker_loss": "continue", "logs.max": "10MB", "timeouts.start": "9s",
    "timeouts.stall": "9s", "timeouts.total": "9s", "env": "{A: b}", "secrets": "[A]",
    "data": "[{from: a, to: b}]", "outputs": "[out/]", "groups": "[{name: evaluate, script: evaluate.py}]",
    "metrics.interval": "5s", "metrics.tensorboard": "true", "metrics.prometheus": "9464",
    "metrics.mlflow": "https://m.example.org", "metrics.wandb": "team/digits",
    "workers.per_host": "2", "workers.min": "2",
    "workers.max": "2", "servers.per_host": "2",
}  # fmt: skip
CLUSTER = {
    "name": "other", "version": "1", "ssh.user": "u", "ssh.port": "23", "ssh.identity_file": "~/.ssh/k",
    "ssh.proxy_jump": "b", "ssh.host_key_policy": "accept-new", "ssh.connect_timeout": "9s",
    "network.interface": "eth1", "network.ports": "2000-3000", "network.congestion": "bbr",
    "network.require_encryption": "true", "network.encryption": "off", "network.measure_messages": "false",
    "runtime.python": "py", "runtime.environment": "existing", "runtime.workdir": "/w", "runtime.torch": "2.5.1",
    "runtime.requirements": "[numpy]", "runtime.wheelhouse": "w", "runtime.index": "https://example.org/simple",
    "kind": "command\nexec: 'a {host} {command}'", "exec": "'a {host} {command}'\nkind: command", "hosts.from": "list",
    "steps": "true\nkind: command\nexec: 'a {host} {command}'",
    "nodes": "2\nkind: slurm", "partition": "p\nkind: slurm", "account": "a\nkind: slurm",
    "gpus_per_node": "2\nkind: slurm", "time": "1h\nkind: slurm", "extra": "[--qos=a]\nkind: slurm",
    "runtime.env": "{A: b}", "links": "[{between: [a, c], bandwidth: 1 GB/s}]", "hosts": "[b]",
}  # fmt: skip
HOST = {
    "address": "b", "name": "c", "user": "u", "port": "23", "internal_address": "10.0.0.1", "slots": "2",
    "roles": "[server]", "labels": "{a: b}",
}  # fmt: skip
ONE_VALUE = {"version"}
"""Keys of which this version takes only what is the default."""


def keys(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key that the schema names, with its own schema; items of lists are left to their own walk."""
    for name, body in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        sections = [one for one in [body, *body.get("anyOf", [])] if "properties" in one]
        if not any(one is body for one in sections):
            yield below, body
        for section in sections:
            yield from keys(section, below)


def host_schema() -> dict[str, Any]:
    [hosts] = [one for one in cluster_schema()["properties"]["hosts"]["anyOf"] if "items" in one]
    return next(one for one in hosts["items"]["anyOf"] if "properties" in one)


def nested(path: str, value: str) -> str:
    """Return "a.b", "1" as YAML: {a: {b: 1}} without the outer braces."""
    head, *rest = path.split(".")
    for key in reversed(rest):
        value = f"{{{key}: {value}}}"
    return f"{head}: {value}"


def test_every_key_is_described() -> None:
    for schema in (cluster_schema(), job_schema(), host_schema()):
        for path, body in keys(schema):
            assert len(body["description"]) > 8, path
            assert body["description"].endswith((".", ",...")), path


def test_the_schema_names_each_key_and_no_other() -> None:
    assert {path for path, _ in keys(job_schema())} == {*JOB, "checkpoint.keep_best"}
    assert {path for path, _ in keys(cluster_schema())} == set(CLUSTER)
    assert {path for path, _ in keys(host_schema())} == set(HOST)


@pytest.mark.parametrize(("path", "value"), JOB.items())
def test_the_job_loader_accepts_each_key_and_it_changes_the_result(path: str, value: str) -> None:
    base = ["name: x", "script: t.py"]
    kept = [line for line in base if not line.startswith(path) and (path != "module" or "script" not in line)]
    before = load_job("\n".join(base), "j")
    after = load_job("\n".join([*kept, nested(path, value)]), "j")
    assert (after != before) is (path not in ONE_VALUE), "a key that nothing reads"


@pytest.mark.parametrize(("path", "value"), CLUSTER.items())
def test_the_cluster_loader_accepts_each_key_and_it_changes_the_result(path: str, value: str) -> None:
    base = ["name: x", "hosts: [a, c]"]
    replaced = ("hosts",) if "slurm" in value else (path.partition(".")[0],)
    kept = [line for line in base if not line.startswith(replaced)]
    before = load_cluster("\n".join(base), "c")
    after = load_cluster("\n".join([*kept, nested(path, value)]), "c")
    assert (after != before) is (path not in ONE_VALUE), "a key that nothing reads"


@pytest.mark.parametrize(("key", "value"), HOST.items())
def test_the_loader_accepts_each_key_of_a_host(key: str, value: str) -> None:
    address = "" if key == "address" else "address: a, "
    after = load_cluster(f"name: x\nhosts: [{{{address}{key}: {value}}}]", "c")
    assert after != load_cluster("name: x\nhosts: [a]", "c")


@pytest.mark.parametrize("path", ["sync.strategy", "sync.consistency", "sync.compression", "restart.on_worker_loss"])
def test_the_schema_offers_only_values_that_this_version_takes(path: str) -> None:
    body = dict(keys(job_schema()))[path]
    for value in body["enum"] if "enum" in body else body["anyOf"][0]["enum"]:
        load_job(f"name: x\nscript: t.py\n{nested(path, str(value))}", "j")


def test_no_group_of_keys_takes_unknown_ones() -> None:
    for schema in (cluster_schema(), job_schema()):
        text = repr(schema)
        assert text.count("'properties'") == text.count("'additionalProperties': False")
    with pytest.raises(PsctlError):
        load_job("name: x\nscript: t.py\nfoo: 1", "j")
