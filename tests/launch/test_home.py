"""What psctl remembers: job names without races, clusters by name, jobs by reference."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from psctl import errors
from psctl.launch.clusters import choose_cluster
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster

LAB = KnownCluster("lab", "/somewhere/lab.yaml", "name: lab\nhosts: [node-a]\n", 5.0)


def record(job: str, created: float) -> JobRecord:
    return JobRecord(
        job=job, name=job.rpartition("-")[0], created=created, cluster=LAB,
        hosts=[HostRecord("node-a", "/w", f"/w/jobs/{job}/node-a", "/usr/bin/python3", "/w/code/x")],
        job_file="", job_source="/job.yaml", job_folder="/", code_hash="x", checkpoints="/w/checkpoints",
    )  # fmt: skip


def test_twenty_psctl_at_once_get_twenty_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(20) as pool:
        names = list(pool.map(lambda _: Home(tmp_path).reserve_name("digits"), range(20)))
    assert sorted(names) == sorted(f"digits-{number}" for number in range(1, 21))


def test_a_name_is_above_those_on_the_hosts(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.reserve_name("digits", above=7) == "digits-8"
    assert home.reserve_name("digits") == "digits-9"
    home.release_name("digits-9")
    assert home.reserve_name("digits-a") == "digits-a-1"
    assert home.reserve_name("digits") == "digits-9"


def test_a_job_is_meant_by_its_number_its_name_or_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for job, created in (("digits-1", 1.0), ("digits-2", 3.0), ("mlp-1", 2.0)):
        home.save_record(record(job, created))
    assert home.job("digits-1").job == "digits-1"
    assert home.job("digits").job == "digits-2"
    assert home.job("mlp").job == "mlp-1"
    assert home.job(None).job == "digits-2"
    with pytest.raises(errors.NoSuchJob, match="known: digits-1, mlp-1, digits-2") as raised:
        home.job("digits-7")
    assert raised.value.exit == 6


def test_without_jobs_the_hint_is_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchJob) as raised:
        Home(tmp_path).job(None)
    assert raised.value.hint == "psctl train JOB.yaml"


def test_a_reserved_name_without_a_record_is_no_job(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.reserve_name("digits")
    assert home.jobs() == []


def test_the_cluster_is_looked_up_in_the_promised_order(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nhosts: [node-a]\n")
        home.save_cluster(KnownCluster(name, str(tmp_path / f"{name}.yaml"), f"name: {name}\nhosts: [node-a]\n", 0.0))
    home.set_current("three")
    environment = {"PSCTL_CLUSTER": "two"}
    path = str(tmp_path / "one.yaml")

    def named(asked: str | None, job: str | None, environment: dict[str, str]) -> str:
        found = choose_cluster(home, asked, job_cluster=job, job_folder=tmp_path, environment=environment)
        return found.spec.name

    assert named(path, "two", environment) == "one"
    assert named(None, "./one.yaml", environment) == "one"
    assert named(None, None, environment) == "two"
    assert named(None, None, {}) == "three"
    home.remove_cluster("three")
    assert named(None, None, {}) == "local"


def test_the_embedded_cluster_keeps_its_things_in_psctls_own_home(tmp_path: Path) -> None:
    chosen = choose_cluster(Home(tmp_path), None)
    assert chosen.embedded
    assert chosen.spec.runtime.workdir == str(tmp_path / "host")
    assert chosen.spec.hosts[0].local


def test_what_was_measured_goes_with_the_cluster(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.save_cluster(LAB)
    assert home.load_measurement("links", "lab", KnownCluster) is None
    home.save_measurement("links", "lab", LAB)
    assert home.load_measurement("links", "lab", KnownCluster) == LAB
    assert (home.load_measurement("reach", "lab", KnownCluster), home.clusters()) == (None, ["lab"])
    (tmp_path / "measured/links/lab.json").write_text("{")
    assert home.load_measurement("links", "lab", KnownCluster) is None, "a damaged one is measured anew"
    home.save_measurement("reach", "lab", LAB)
    home.remove_cluster("lab")
    assert (
        home.load_measurement("links", "lab", KnownCluster),
        home.load_measurement("reach", "lab", KnownCluster),
    ) == (None, None)


def test_a_name_that_up_has_not_seen_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchCluster, match="none yet") as raised:
        choose_cluster(Home(tmp_path), "lab")
    assert "psctl up lab.yaml" in raised.value.hint
    with pytest.raises(errors.NoSuchCluster, match="no such file"):
        choose_cluster(Home(tmp_path), "./nowhere.yaml")


@pytest.mark.parametrize("refusal", [None, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_locks_hold_on_file_systems_with_and_without_locks(
    refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, machine, lock = Home(tmp_path / "home"), tmp_path / "machine", fcntl.flock
    machine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machine))

    def flock(file: Any, how: int) -> None:
        if refusal is not None and os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(str(home.root)):
            raise OSError(refusal, os.strerror(refusal))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    (home.root / "jobs" / "digits-1").mkdir(parents=True)
    assert not home.is_being_submitted("digits-1")
    with home.submission_lock("digits-1"):
        assert home.is_being_submitted("digits-1")
        assert not home.is_being_submitted("digits-2")
    assert not home.is_being_submitted("digits-1")

    entered = threading.Event()

    def start() -> None:
        with home.start_lock():
            entered.set()

    other = threading.Thread(target=start)
    with home.start_lock():
        other.start()
        assert not entered.wait(0.2), "two look for free slots at once"
    assert entered.wait(10)
    other.join()
    assert bool(list(machine.iterdir())) is (refusal is not None)


def test_another_error_of_a_lock_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"), Home(tmp_path).start_lock():
        pass
