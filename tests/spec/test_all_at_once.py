"""All mistakes of a file are reported at once, by line; for a key at the wrong level, with its right place."""

from __future__ import annotations

import pytest

from psctl.errors import PsctlError
from psctl.spec.cluster import load_cluster
from psctl.spec.job_file import load_job

JOB = """version: 1
name: digits-7
script: train.py
workes: 2
servers: -1
strategy: ring
sync:
  strategy: rong
  workers: 2
  strategy: ps
  period: [3]
checkpoint:
  evry: 100 steps
timeouts: {start: soon, stall: 5m}
env: {RANK: "1", HOME: !!str x}
hosts: [a, b]
"""

CLUSTER = """name: lab
hosts:
  - node[3-1]
  - {address: a, pot: 22}
  - {address: b, roles: [boss]}
  - {nam: c}
identity_file: ~/.ssh/key
workers: 2
network: {ports: 80-90, interfac: eth0}
links: [{between: [a, z], bandwidth: 1 Gbit/s}]
runtime: {environment: existing, requirements: [numpy]}
"""


def errors_of(caught: pytest.ExceptionInfo[PsctlError]) -> list[tuple[int, str]]:
    """Line and message of every error."""
    every = [caught.value, *caught.value.others]
    return [(int(each.where.split(":")[1]), each.message) for each in every]


def test_all_mistakes_of_a_job_file_are_reported_by_line() -> None:
    with pytest.raises(PsctlError) as caught:
        load_job(JOB, "job.yaml")
    found = errors_of(caught)
    assert [line for line, _ in found] == [2, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 15, 16]
    text = dict(found)
    assert text[4] == 'workes: unknown key, did you mean "workers"?'
    assert text[6] == "strategy: unknown key here: `strategy` belongs under `sync:`"
    assert text[9] == "sync.workers: unknown key here: `workers` belongs at the top"
    assert text[10].startswith("sync.strategy: duplicate key")
    assert text[16] == "hosts: unknown key: `hosts` belongs in the cluster file"
    assert all(each.hint for each in (caught.value, *caught.value.others))
    document = caught.value.document()["error"]
    assert len(document["others"]) == len(found) - 1  # type: ignore[arg-type]


def test_all_mistakes_of_a_cluster_file_are_reported_by_line() -> None:
    with pytest.raises(PsctlError) as caught:
        load_cluster(CLUSTER, "lab.yaml")
    found = errors_of(caught)
    assert [line for line, _ in found] == [3, 4, 5, 6, 6, 7, 8, 9, 9, 11]
    text = dict(found)
    assert text[7] == "identity_file: unknown key here: `identity_file` belongs under `ssh:`"
    assert text[8] == "workers: unknown key: `workers` belongs in the job file"
    assert "links" not in str(found), "what hosts there are is not known, so ends of links are not judged"


@pytest.mark.parametrize(
    ("key", "belongs", "hint"),
    [
        ("every: 5 steps", "under `checkpoint:`", "write checkpoint: {every: ...}"),
        ("metric: loss", "under `checkpoint: keep_best:`", "write checkpoint: {keep_best: {metric: ...}}"),
        ("stall: 5m", "under `timeouts:`", "write timeouts: {stall: ...}"),
        ("topk: 0.1", "under `sync: compression:`", "write sync: {compression: {topk: ...}}"),
    ],
)
def test_a_key_at_the_wrong_level_is_reported_with_its_right_place(key: str, belongs: str, hint: str) -> None:
    with pytest.raises(PsctlError) as caught:
        load_job(f"name: j\nscript: train.py\n{key}\n", "job.yaml")
    assert caught.value.others == ()
    assert f"belongs {belongs}" in caught.value.message
    assert caught.value.hint == hint


def test_a_misspelt_required_key_is_reported_once() -> None:
    with pytest.raises(PsctlError) as caught:
        load_job("nmae: j\nscrpt: train.py\n", "job.yaml")
    assert [message for _, message in errors_of(caught)] == [
        'nmae: unknown key, did you mean "name"?', 'scrpt: unknown key, did you mean "script"?',
    ]  # fmt: skip


def test_contradictions_are_reported_beside_other_mistakes_but_not_of_what_is_wrong_itself() -> None:
    with pytest.raises(PsctlError) as caught:
        load_job("name: j\nscript: a.py\nmodule: b\nseed: -1\nsync: {strategy: rong, consistency: asp}\n", "job.yaml")
    assert [message.split(":")[0] for _, message in errors_of(caught)] == ["module", "seed", "sync.strategy"]


def test_one_mistake_has_no_others_in_its_document() -> None:
    with pytest.raises(PsctlError) as caught:
        load_job("name: j\nscript: a.py\nseed: -1\n", "job.yaml")
    assert set(caught.value.document()["error"]) == {"code", "exit", "message", "hint", "where"}
