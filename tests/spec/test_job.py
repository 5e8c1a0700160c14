"""job.yaml is read as the contract with the user shows it; mistakes, and contradictions are refused."""

from __future__ import annotations

import pytest

from psctl.errors import InvalidFile, PsctlError, UsageError
from psctl.spec.job import Elastic, Every, JobSpec, KeepBest, PerHost
from psctl.spec.job_file import load_job
from psctl.types import PLAIN, STRATEGIES, Address, Compression

FULL = """\
version: 1
name: digits
script: train.py                # or module: pkg.train
args: [--epochs, "10"]
workdir: .
exclude: [data/]
cluster: null
workers: auto
servers: auto
seed: 0
sync:
  strategy: auto
  consistency: bsp              # bsp | asp | {ssp: 4}
  update: auto
  period: 1
  compression: none
  batchnorm: local
  size: null
replicas: auto
checkpoint: {to: null, every: 500 steps, keep: 3, keep_best: {metric: loss, mode: min}, on_stop: true, copies: 1}
restart: {max: 3}
timeouts: {start: 2m, stall: 5m, total: null}
env: {NCCL_DEBUG: WARN, HF_TOKEN: }         # bare = taken from my shell
secrets: [WANDB_API_KEY]
metrics: {interval: 1s, tensorboard: false}
"""
SHORT = "name: x\nscript: t.py\n"


def short(more: str, *overrides: str) -> JobSpec:
    return load_job(SHORT + more, "j.yaml", overrides)


def test_the_documented_file_is_read_whole() -> None:
    job = load_job(FULL, "j.yaml")
    assert (job.name, job.script, job.module, job.args) == ("digits", "train.py", None, ("--epochs", "10"))
    assert (job.workdir, job.exclude, job.cluster) == (".", ("data/",), None)
    assert (job.workers, job.servers, job.seed, job.replicas) == ("auto", "auto", 0, "auto")
    assert (job.sync.strategy, job.sync.consistency, job.sync.update) == ("auto", "bsp", "auto")
    assert (job.checkpoint.every, job.checkpoint.keep_best) == (Every(steps=500), KeepBest(metric="loss", mode="min"))
    assert (job.timeouts.start, job.timeouts.stall, job.timeouts.total) == (120.0, 300.0, None)
    assert job.env == {"NCCL_DEBUG": "WARN", "HF_TOKEN": None}
    assert (job.secrets, job.metrics.interval, job.source) == (("WANDB_API_KEY",), 1.0, "j.yaml")


def test_the_documented_file_has_the_defaults() -> None:
    written = load_job(FULL, "j.yaml")
    bare = load_job("name: digits\nscript: train.py\n", "j.yaml")
    for key in ("sync", "workers", "servers", "seed", "replicas", "checkpoint", "restart", "timeouts", "metrics"):
        assert getattr(bare, key) == getattr(written, key), key


def test_values_of_env_and_args_are_taken_as_text() -> None:
    job = short("env: {A: 1, B: yes, C: 0755, D: 1.50, E: '', F: null}\nargs: [--lr, 1e-3, -5, true]")
    assert job.env == {"A": "1", "B": "yes", "C": "0755", "D": "1.50", "E": "", "F": None}
    assert job.args == ("--lr", "1e-3", "-5", "true")


def test_so_many_a_host() -> None:
    job = short("workers: {per_host: 4}\nservers: 2")
    assert (job.workers, job.servers) == (PerHost(per_host=4), 2)
    assert short("workers: {min: 2, max: 8}").workers == Elastic(min=2, max=8)


@pytest.mark.parametrize(
    ("text", "every"),
    [("500 steps", Every(steps=500)), ("1 step", Every(steps=1)), ("10m", Every(seconds=600.0)), ("null", None)],
)
def test_a_checkpoint_is_due_by_steps_or_by_time(text: str, every: Every | None) -> None:
    assert short(f"checkpoint: {{every: {text}}}").checkpoint.every == every


def test_the_size_of_gradients_has_a_unit() -> None:
    assert short("sync: {size: 160MB}").sync.size == 160_000_000


def test_older_words_for_true_and_false_are_read() -> None:
    assert short("checkpoint: {on_stop: no}").checkpoint.on_stop is False


@pytest.mark.parametrize(
    ("more", "where", "says"),
    [
        ("wrokers: 2", "3:1", 'wrokers: unknown key, did you mean "workers"?'),
        ("sync: {stratgy: ps}", "3:8", 'sync.stratgy: unknown key, did you mean "strategy"?'),
        ("sync: {strategy: rign}", "3:18", 'sync.strategy: unknown value rign, did you mean "ring"?'),
        ("sync: {strategy: Ring}", "3:18", 'did you mean "ring"?'),
        ("sync: ps", "3:7", "sync: expected keys with values, got ps"),
        ("workers: 0", "3:10", "workers: expected auto or 1..65536, got 0"),
        ("workers: two", "3:10", "workers: expected auto or 1..65536, got two"),
        ("workers: 2.5", "3:10", "workers: expected auto or"),
        ("workers: {per_hots: 1}", "3:11", 'workers.per_hots: unknown key, did you mean "per_host"?'),
        ("workers: [1]", "3:10", "workers: expected auto or 1..65536, got a list"),
        ("servers: -1", "3:10", "servers: expected auto or 0..65536, got -1"),
        ("seed: -1", "3:7", "seed: expected 0..4294967295, got -1"),
        ("args: --epochs 10", "3:7", 'args: expected a list, got "--epochs 10"'),
        ("args: [[a]]", "3:8", "args[0]: expected text, got a list"),
        ("env: [A=1]", "3:6", "env: expected keys with values, got a list"),
        ("env: {A: {b: 1}}", "3:10", "env.A: expected text, got keys with values"),
        ("env: {1A: b}", "3:7", "env.1A: expected the name of a variable"),
        ("secrets: [A=b]", "3:11", "secrets[0]: expected the name of a variable"),
        ("checkpoint: {every: 500}", "3:21", 'checkpoint.every: expected "500 steps", a duration'),
        ("checkpoint: {every: 0 steps}", "3:21", "expected at least 1 step or 1s"),
        ("checkpoint: {every: {steps: 5}}", "3:21", 'checkpoint.every: expected "500 steps"'),
        ("checkpoint: {keep: 0}", "3:20", "checkpoint.keep: expected 1..100000, got 0"),
        ("checkpoint: {keep_best: {mode: low}}", "3:32", "checkpoint.keep_best.mode: unknown value low"),
        ("timeouts: {stall: 5 minutes}", "3:19", "units are d, h, m, s, ms, us, ns"),
        ("timeouts: {start: 0s}", "3:19", "timeouts.start: expected a duration of 1 s to"),
        ("sync: {size: 160 Mb}", "3:14", 'unknown unit "Mb"; sizes are in B, kB, MB'),
        ("sync: {compression: {topk: 2}}", "3:28", "sync.compression.topk: expected a number above 0, at most 1"),
        ("metrics: {tensorboard: 1}", "3:24", "metrics.tensorboard: expected true, false, or a folder on the head"),
        ("metrics: {tensorboard: runs}", "3:24", "that begins with / or ~/, got runs"),
        ("metrics: {mlflow: here}", "3:19", "metrics.mlflow: expected a URI such as https://mlflow.example.org"),
        ("metrics: {mlflow: 'https://me:pw@m.org'}", "3:19", "a URI with a password would be in every checkpoint"),
        ("metrics: {wandb: a/b/c}", "3:18", "metrics.wandb: expected PROJECT or ENTITY/PROJECT, got a/b/c"),
        ("metrics: {prometheus: 0}", "3:23", "metrics.prometheus: expected a port, 1..65535, or"),
        ("metrics: {prometheus: 70000}", "3:23", "got 70000"),
        ('metrics: {prometheus: "head:9464"}', "3:23", 'NUMERIC-ADDRESS:PORT such as 10.0.0.1:9464, got "head:9464"'),
        ('metrics: {prometheus: ":9464"}', "3:23", "metrics.prometheus: expected a port"),
        ('metrics: {prometheus: "::1:9464"}', "3:23", "expected brackets around an IPv6 address, such as [::1]:9464"),
        ("script: u.py", "3:1", "script: duplicate key"),
    ],
)
def test_a_mistake_is_reported_with_place_path_and_nearest_name(more: str, where: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        short(more)
    assert caught.value.where == f"j.yaml:{where}"
    assert says in caught.value.message


@pytest.mark.parametrize("name", ["digits-3", "a-0", "-x", "a b", "../x", "a@b", "", "x" * 64])
def test_a_job_cannot_have_this_name(name: str) -> None:
    with pytest.raises(InvalidFile, match="name: expected a name") as caught:
        load_job(f"name: '{name}'\nscript: t.py", "j.yaml")
    assert caught.value.where == "j.yaml:1:7"


@pytest.mark.parametrize("name", ["digits", "mnist-v2", "a3", "resnet-50x", "my_job.2"])
def test_a_job_can_have_this_name(name: str) -> None:
    assert load_job(f"name: {name}\nscript: t.py", "j.yaml").name == name


@pytest.mark.parametrize(
    ("more", "where", "says"),
    [
        (
            "sync: {consistency: asp, strategy: ring}",
            "3:21",
            "sync.consistency: asp cannot be combined with strategy: ring",
        ),
        (
            "sync: {strategy: native, consistency: {ssp: 4}}",
            "3:39",
            "{ssp: 4} cannot be combined with strategy: native",
        ),
        (
            "sync: {update: worker, consistency: {ssp: 4}}",
            "3:16",
            "worker cannot be combined with consistency: {ssp: 4}",
        ),
        ("sync: {update: worker, consistency: asp}", "3:16", "worker cannot be combined with consistency: asp"),
        ("sync: {period: 4, consistency: asp}", "3:16", "sync.period: 4 cannot be combined with consistency: asp"),
        ("sync: {update: server, period: 4}", "3:16", "sync.update: server cannot be combined with period: 4"),
        (
            "sync: {period: 4, consistency: {ssp: 2}}",
            "3:16",
            "sync.period: 4 cannot be combined with consistency: {ssp: 2}",
        ),
        (
            "sync: {update: server, strategy: native}",
            "3:16",
            "sync.update: server cannot be combined with strategy: native",
        ),
        ("sync: {strategy: ring, replan: true}", "3:32", "sync.replan: true cannot be combined with strategy: ring"),
        (
            "sync: {replan: true}\ngroups: [{name: evaluate, script: e.py}]",
            "3:16",
            "sync.replan: true cannot be combined with groups, which read servers: the strategy is ps",
        ),
        ("sync: {compression: onebit, strategy: tree}", "3:21", "sync.compression: onebit cannot be combined with"),
        (
            "sync: {compression: {topk: 0.1}, strategy: native}",
            "3:21",
            "sync.compression: topk cannot be combined with",
        ),
        ("sync: {filters: [{random_skip: 0.5}], strategy: ring}", "3:17", "sync.filters: filters cannot be combined"),
        ("sync: {compression: int8}\nservers: 0", "3:21", "sync.compression: needs servers (int8)"),
        ("sync: {factor_rows: 8, strategy: ps}", "3:21", "sync.factor_rows: 8 cannot be combined with strategy: ps"),
        ("sync: {factor_rows: 8, consistency: asp}", "3:21", "8 cannot be combined with consistency: asp"),
        ("sync: {factor_rows: 8, update: server}", "3:21", "8 cannot be combined with update: server"),
        ("sync: {factor_rows: 8, period: 4}", "3:21", "8 cannot be combined with period: 4"),
        ("sync: {factor_rows: 8, compression: bf16}", "3:21", "8 cannot be combined with compression: bf16"),
        (
            "sync: {batchnorm: sync, consistency: asp}",
            "3:19",
            "sync.batchnorm: sync cannot be combined with consistency",
        ),
        (
            "sync: {batchnorm: sync, consistency: {ssp: 2}}",
            "3:19",
            "sync cannot be combined with consistency: {ssp: 2}",
        ),
        (
            "sync: {batchnorm: sync}\nrestart: {on_worker_loss: continue}",
            "3:19",
            "sync cannot be combined with restart.on_worker_loss: continue: every layer's statistics need all workers",
        ),
        ("sync: {update: sharded, strategy: ps}", "3:16", "sync.update: sharded cannot be combined with strategy: ps"),
        ("sync: {update: sharded, strategy: tree}", "3:16", "sharded cannot be combined with strategy: tree"),
        ("sync: {update: sharded, consistency: asp}", "3:16", "sharded cannot be combined with consistency: asp"),
        ("sync: {update: sharded, period: 4}", "3:16", "sharded cannot be combined with period: 4"),
        ("sync: {update: sharded, compression: int8}", "3:16", "sharded cannot be combined with compression: int8"),
        ("sync: {update: sharded, factor_rows: 8}", "3:16", "sharded cannot be combined with factor_rows"),
        ("sync: {update: sharded, bucket: auto}", "3:16", "sharded cannot be combined with bucket: auto"),
        ("sync: {update: sharded}\nservers: 2", "3:16", "sharded cannot be combined with servers: 2"),
        ("sync: {update: sharded}\nreplicas: 1", "3:16", "sharded cannot be combined with replicas: 1"),
        (
            "sync: {update: sharded}\ngroups: [{name: evaluate, script: e.py}]",
            "3:16",
            "sharded cannot be combined with groups",
        ),
        ("sync: {step_in_backward: true}", "3:26", "true cannot be combined with update: auto"),
        ("sync: {step_in_backward: true, update: worker}", "3:26", "true cannot be combined with update: worker"),
        (
            "sync: {step_in_backward: true, update: server, consistency: {ssp: 2}}",
            "3:26",
            "true cannot be combined with consistency: {ssp: 2}: no worker waits for these values",
        ),
        (
            "sync: {step_in_backward: true, update: sharded, strategy: native}",
            "3:26",
            "sync.step_in_backward: true cannot be combined with strategy: native",
        ),
        ("sync: {sums: rack}", "3:14", "sync.sums: rack cannot be combined with strategy: auto"),
        ("sync: {sums: rack, strategy: ps, consistency: asp}", "3:14", "rack cannot be combined with consistency: asp"),
        ("sync: {sums: rack, strategy: ps, compression: bf16}", "3:14", "cannot be combined with compression: bf16"),
        ("sync: {factor_rows: 0}", "3:21", "sync.factor_rows: expected 1..1000000, got 0"),
        ("sync: {bucket: 1MB, strategy: ps}", "3:16", "sync.bucket: 1 MB cannot be combined with strategy: ps"),
        ("sync: {bucket: auto, consistency: asp}", "3:16", "auto cannot be combined with consistency: asp"),
        ("sync: {bucket: auto, update: server}", "3:16", "auto cannot be combined with update: server"),
        ("sync: {bucket: auto, period: 4}", "3:16", "sync.bucket: auto cannot be combined with period: 4"),
        ("sync: {bucket: 0MB}", "3:16", "sync.bucket: expected a size of at least 1 B, got 0MB"),
        ("sync: {bucket: small}", "3:16", "sync.bucket: "),
        ("sync: {filters: [{}]}", "3:18", "sync.filters[0]: 0 filters in one entry"),
        (
            "sync: {filters: [{random_skip: 0.5, significance: 0.1}]}",
            "3:18",
            "sync.filters[0]: 2 filters in one entry",
        ),
        (
            "sync: {filters: [{random_skip: 0.5}, {random_skip: 0.1}]}",
            "3:52",
            "sync.filters[1].random_skip: is given twice",
        ),
        (
            "sync: {filters: [{significance: 1}]}",
            "3:33",
            "sync.filters[0].significance: with 1 no element may be sent",
        ),
        ("sync: {strategy: native}\nreplicas: 1", "4:11", "replicas: 1 cannot be combined with strategy: native"),
        ("sync: {strategy: ps}\nservers: 0", "4:10", "servers: 0, but strategy: ps needs at least one"),
        ("module: pkg.train", "3:9", "module: script: t.py is given too"),
        ("env: {RANK: 0}", "3:13", "env.RANK: psctl sets this variable itself"),
        ("env: {TOKEN: a}\nsecrets: [TOKEN]", "3:14", "env.TOKEN: is under secrets too"),
    ],
)
def test_a_contradiction_is_told_first(more: str, where: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        short(more)
    assert caught.value.where == f"j.yaml:{where}"
    assert says in caught.value.message
    assert caught.value.hint


def test_something_must_run() -> None:
    with pytest.raises(InvalidFile, match="script: missing") as caught:
        load_job("name: x\nworkers: 2\n", "j.yaml")
    assert caught.value.where == "j.yaml:1:1"
    assert load_job("name: x\nmodule: pkg.train\n", "j.yaml").module == "pkg.train"


@pytest.mark.parametrize("script", ["/etc/t.py", "../t.py", "~/t.py", "a/../../t.py", "."])
def test_the_script_is_inside_workdir(script: str) -> None:
    with pytest.raises(InvalidFile, match="outside workdir"):
        load_job(f"name: x\nscript: {script}\n", "j.yaml")


@pytest.mark.parametrize(
    ("more", "compression"),
    [
        ("sync: {compression: int8}", Compression("int8")),
        ("sync: {compression: {topk: 0.01}}", Compression("topk", share=0.01)),
        ("sync: {compression: bf16, strategy: ring}", Compression("bf16")),
        (
            "sync: {compression: onebit, filters: [{significance: 0.5}, {random_skip: 0.25}], strategy: ps}",
            Compression("onebit", skip=0.25, significance=0.5),
        ),
        ("sync: {filters: []}", PLAIN),
    ],
)
def test_compression_and_filters_are_one_value(more: str, compression: Compression) -> None:
    assert short(more).sync.compressed == compression


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_promised_strategy_is_taken(strategy: str) -> None:
    assert short(f"sync: {{strategy: {strategy}}}").sync.strategy == strategy


def test_overrides_come_before_the_check() -> None:
    job = short("sync: {strategy: rign}", "sync.strategy=ps", "checkpoint.every=10m", "env.A=1", "args=[--lr, 0.1]")
    assert (job.sync.strategy, job.checkpoint.every, job.env) == ("ps", Every(seconds=600.0), {"A": "1"})
    assert job.args == ("--lr", "0.1")
    assert short("workers: 2", "workers.per_host=3").workers == PerHost(per_host=3)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("sync.strategy=rign", 'did you mean "ring"?'),
        ("sync.stratgy=ps", "sync.stratgy: unknown key"),
        ("workers=0", "workers: expected auto or"),
        ("sync.compression=bf61", 'did you mean "bf16"?'),
        ("args=[a", "not YAML"),
    ],
)
def test_a_wrong_override_is_named(override: str, says: str) -> None:
    with pytest.raises(PsctlError) as caught:
        short("", override)
    assert caught.value.where == f"--set {override}"
    assert says in caught.value.message
    assert caught.value.exit == 2


@pytest.mark.parametrize("override", ["a", "=1", "a b=1", "sync..x=1"])
def test_an_override_is_key_and_value(override: str) -> None:
    with pytest.raises(UsageError, match="expected key=value"):
        short("", override)


def test_a_contradiction_through_an_override_blames_the_override() -> None:
    with pytest.raises(InvalidFile) as caught:
        short("sync: {strategy: native}", "sync.update=server")
    assert caught.value.where == "--set sync.update=server"


@pytest.mark.parametrize(
    "line",
    ["workers: 0", "seed: x", "sync: {strategy: pss}", "env: {3a: x}", "timeouts: {start: 5}", "args: 3", "nam: 1"],
)
def test_every_refusal_has_a_hint(line: str) -> None:
    with pytest.raises(InvalidFile) as raised:
        load_job(f"name: x\nscript: t.py\n{line}\n", "j.yaml")
    assert raised.value.hint
    assert raised.value.where.startswith("j.yaml:3:")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", Address("127.0.0.1", 9464)),
        ('"localhost:1"', Address("127.0.0.1", 1)),
        ('"10.0.0.1:65535"', Address("10.0.0.1", 65535)),
        ('"[::1]:9464"', Address("::1", 9464)),
        ("null", None),
    ],
)
def test_prometheus_is_a_port_of_the_loopback_or_an_address(text: str, address: Address | None) -> None:
    assert short(f"metrics: {{prometheus: {text}}}").metrics.prometheus == address


@pytest.mark.parametrize(("text", "value"), [("true", True), ("no", False), ("/logs", "/logs"), ("~/tb", "~/tb")])
def test_tensorboard_is_a_switch_or_a_folder(text: str, value: bool | str) -> None:
    assert short(f"metrics: {{tensorboard: {text}}}").metrics.tensorboard == value
