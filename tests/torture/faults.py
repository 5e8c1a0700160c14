"""The faults: what is done to hosts, links, disks and processes of a job in training, and what must be seen of it.

A fault takes the trial, does harm, undoes it where it can, and returns when the job shows what docs/failures.md
promises. AssertionError: it does not. The trial itself checks that training goes on and with which values.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.helpers.control_group import memory_limit
from tests.helpers.job_on_hosts import DEADLINE
from tests.helpers.running import STEADY, set_args

if TYPE_CHECKING:
    from tests.torture.trial import Trial

CHECKPOINTS = "/root/.psctl/host/checkpoints"


def _last(trial: Trial, seconds: float) -> None:
    """Let a fault last: time on the wire is the fault."""
    time.sleep(seconds)
    assert not trial.job.of("finished"), trial.job.events[-1]


def _nothing_lost(trial: Trial, before: list[str]) -> None:
    assert trial.job.lost() == before, f"lost {trial.job.lost()[len(before) :]}, and nothing should be"


def _kill(trial: Trial, kind: str) -> str:
    """Kill one process of a kind; return its host once the loss is in the event log."""
    job, before = trial.job, len(trial.job.lost())
    running = job.until(lambda: job.processes(kind), f"a {kind}")  # all may just start again
    host, pid = trial.chance.choice(running)
    job.signal(host, pid, "KILL")
    job.until(lambda: len(job.lost()) > before, f"the loss of a {kind} on {host} in the event log")
    return host


# ---- processes -----------------------------------------------------------------------------------------------------


def kill_server(trial: Trial) -> None:
    """One server; the others have its shards, so no step is repeated."""
    before = len(trial.job.of("restored"))
    _kill(trial, "server")
    trial.made_good()
    assert len(trial.job.of("restored")) == before, "the loss of one server sent all processes back to a checkpoint"


def kill_worker(trial: Trial) -> None:
    """One worker, any."""
    _kill(trial, "worker")


def kill_two_workers(trial: Trial) -> None:
    """Two workers at about the same time."""
    _kill(trial, "worker")
    time.sleep(trial.chance.random())
    _kill(trial, "worker")


def kill_server_after_worker(trial: Trial) -> None:
    """A server, while a worker is being replaced."""
    _kill(trial, "worker")
    time.sleep(trial.chance.random())
    _kill(trial, "server")


def kill_two_servers(trial: Trial) -> None:
    """A second server before the first one's shards are filled again."""
    _kill(trial, "server")
    time.sleep(trial.chance.random() / 2)
    _kill(trial, "server")


def stop_process(trial: Trial) -> None:
    """A worker or a server stands still for 20 s and is named if training waits for it: a server may hold no shard."""
    job, lost = trial.job, trial.job.lost()
    kind = trial.chance.choice(["worker", "server"] if trial.strategy == "ps" else ["worker"])
    host, pid = trial.chance.choice(job.processes(kind))
    before = len(job.notices("wait"))
    job.signal(host, pid, "STOP")
    try:
        time.sleep(2)
        steps = len(job.of("progress"))
        _last(trial, 18)
        waited = len(job.of("progress")) == steps
    finally:
        job.signal(host, pid, "CONT")
    assert waited or kind == "server", "training does not wait for a worker"
    named = [text for text in job.notices("wait")[before:] if f"{kind}/" in text and f" on {host}" in text]
    assert named or not waited, f"no notice names the {kind} on {host}, which is stopped"
    _nothing_lost(trial, lost)


def kill_agent(trial: Trial) -> None:
    """The agent of a host: the host is lost. The head's only where another one may lead."""
    host = trial.chance.choice(trial.hosts() if _await_standby(trial) else trial.others())
    pids = [pid for where, pid in trial.job.processes("agent") if where == host]
    before = trial.losses_of(host)
    trial.job.signal(host, pids[-1], "KILL")
    trial.lost_hosts.append(host)
    trial.job.until(lambda: trial.job.head != host, "another leader", 60)
    trial.job.until(lambda: trial.losses_of(host) > before, f"the loss of {host}")


def kill_coordinator(trial: Trial) -> None:
    """The coordinator: another one continues, and no other process is lost or started again."""
    job, lost, restored = trial.job, trial.job.lost(), len(trial.job.of("restored"))
    before = len(job.notices("a new one continues the job"))
    job.signal(*job.processes("coordinator")[-1], "KILL")
    job.until(lambda: len(job.notices("a new one continues the job")) > before, "a new coordinator")
    trial.wait_for_steps()
    _nothing_lost(trial, lost)
    assert len(job.of("restored")) == restored, "the loss of the coordinator sent all processes back to a checkpoint"


def kill_psctl(trial: Trial) -> None:
    """A psctl that follows the job: the job does not miss it."""
    lost = trial.job.lost()
    with trial.job.psctl.start("attach", trial.job.job, "-o", "jsonl") as follower:
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.kill()
    _nothing_lost(trial, lost)


def no_memory(trial: Trial) -> None:
    """The kernel kills a worker or a server for lack of memory, in a control group with a limit."""
    job = trial.job
    kind = trial.chance.choice(["worker", "server"] if trial.strategy == "ps" else ["worker"])
    host, pid = trial.chance.choice(job.until(lambda: job.processes(kind), f"a {kind}"))
    before = len(job.lost())
    with memory_limit(32 << 20) as group:
        group.add(job.hosts.outer_pid(host, pid))
        group.fill()
        job.until(lambda: len(job.lost()) > before, f"the loss of a {kind} on {host} in the event log")
    reasons = [event["reason"] for event in job.of("worker-lost", "server-lost")[before:]]
    assert any("OutOfMemory" in reason for reason in reasons), reasons


def two_changes(trial: Trial) -> None:
    """Two psctl change the number of servers at the same time: one after the other, or one is refused."""
    job, lost = trial.job, trial.job.lost()

    def scale(servers: int) -> Any:
        return job.psctl.start("scale", job.job, "--servers", str(servers))

    for process in [scale(4), scale(2)]:
        out, err = process.communicate(timeout=DEADLINE)
        refused = process.returncode == 2 and "joining or leaving already" in err
        assert process.returncode == 0 or refused, f"{process.args}: exit {process.returncode}\n{out}\n{err}"
    trial.wait_for_steps()
    job.until(
        lambda: job.psctl.run("scale", job.job, "--servers", "3", timeout=DEADLINE).code == 0, "three servers again"
    )
    _nothing_lost(trial, lost)


# ---- hosts and links -----------------------------------------------------------------------------------------------


def power(trial: Trial) -> None:
    """A host that is not the head loses its power."""
    host = trial.chance.choice(trial.others())
    before = trial.losses_of(host)
    trial.job.hosts.crash(host)
    trial.job.until(lambda: trial.losses_of(host) > before, f"the loss of {host}", 60)
    trial.lost_hosts.append(host)
    trial.gone.append(host)


def boot(trial: Trial) -> None:
    """A host boots, the head too where another one may lead; `psctl up` makes it ready, and the job uses it again."""
    job, host = trial.job, trial.chance.choice(trial.hosts() if _await_standby(trial) else trial.others())
    before, back = trial.losses_of(host), len(job.notices(f"{host} is back"))
    job.hosts.boot(host)
    job.until(lambda: trial.losses_of(host) > before, f"the loss of {host}", 60)
    done = job.psctl.run("up", str(job.cluster), timeout=DEADLINE)
    assert done.code in ((0, 10) if trial.gone else (0,)), done  # 10: a host has no power
    job.until(lambda: len(job.notices(f"{host} is back")) > back, f"{host} in use again", 60)


def cut_3s(trial: Trial) -> None:
    """A link is cut for 3 s, the head's too."""
    lost, host = trial.job.lost(), trial.chance.choice(trial.hosts())
    trial.job.hosts.cut(host)
    try:
        _last(trial, 3)
    finally:
        trial.job.hosts.heal(host)
    trial.wait_for_steps()
    _nothing_lost(trial, lost)


def cut_head(trial: Trial) -> None:
    """The head's own link is cut until another host leads, then healed; without a standby it is cut for 3 s."""
    job, lost, head = trial.job, trial.job.lost(), trial.job.head
    succeeded = _await_standby(trial)
    job.hosts.cut(head)
    try:
        if succeeded:
            job.until(lambda: job.head != head, "another leader", 60)
        else:
            _last(trial, 3)
    finally:
        job.hosts.heal(head)
    if succeeded:
        job.until(lambda: job.notices(f"{head} is back"), f"the return of {head}", 60)
    trial.wait_for_steps()
    if not succeeded:
        _nothing_lost(trial, lost)


def head_power(trial: Trial) -> None:
    """The host that leads loses its power; without a standby another one does."""
    job, head = trial.job, trial.job.head
    if not _await_standby(trial):
        power(trial)
        return
    job.hosts.crash(head)
    trial.lost_hosts.append(head)
    trial.gone.append(head)
    job.until(lambda: job.head != head, "another leader", 60)
    job.until(lambda: any(event["host"] == head for event in job.of("worker-lost", "server-lost")), f"{head}'s loss")


def _await_standby(trial: Trial) -> bool:
    """Wait for the standby of a job that has enough hosts; return whether it has."""
    if trial.lost_hosts:
        return False
    trial.job.until(lambda: trial.job.standby, "the standby", 60)
    return True


def cut_60s(trial: Trial) -> None:
    """A host is cut off until it is lost and its agent has ended its processes; then it is back."""
    host = trial.chance.choice(trial.others())
    before = trial.losses_of(host)
    trial.job.hosts.cut(host)
    trial.lost_hosts.append(host)
    try:
        trial.job.until(lambda: trial.losses_of(host) > before, f"the loss of {host}", 60)
        trial.job.until(lambda: not _members_on(trial, host), f"the end of the processes on {host}", 60)
    finally:
        trial.job.hosts.heal(host)


def _members_on(trial: Trial, host: str) -> list[str]:
    """The processes of the job on a host but its agent, which waits for the coordinator."""
    return [line for _, line in trial.job.hosts.processes(host) if "psctl.agent" not in line]


def flap(trial: Trial) -> None:
    """A link is up and down in turn, a second each."""
    lost, host = trial.job.lost(), trial.chance.choice(trial.others())
    for _ in range(6):
        trial.job.hosts.cut(host)
        try:
            _last(trial, 1)
        finally:
            trial.job.hosts.heal(host)
        _last(trial, 1)
    trial.wait_for_steps()
    _nothing_lost(trial, lost)


def lossy(trial: Trial) -> None:
    """A link loses a tenth of its packets for 10 s."""
    lost = trial.job.lost()
    trial.job.hosts.lose(trial.chance.choice(trial.hosts()), 10)
    trial.wait_for_steps()
    _nothing_lost(trial, lost)


def slow(trial: Trial) -> None:
    """A link carries 1 Mbit/s for 10 s."""
    lost, host = trial.job.lost(), trial.chance.choice(trial.hosts())
    trial.job.hosts.rate(host, "1mbit")
    try:
        _last(trial, 10)
    finally:
        trial.job.hosts.rate(host, trial.rate)
    trial.wait_for_steps()
    _nothing_lost(trial, lost)


def one_way(trial: Trial) -> None:
    """For 3 s no packet of one host arrives at another one, whose own do arrive."""
    lost, (host, toward) = trial.job.lost(), trial.chance.sample(trial.hosts(), 2)
    trial.job.hosts.drop_packets(host, toward)
    try:
        _last(trial, 3)
    finally:
        trial.job.hosts.drop_packets(host, toward, dropped=False)
    trial.wait_for_steps()
    _nothing_lost(trial, lost)


def partition(trial: Trial) -> None:
    """Two hosts that the head reaches do not reach each other for 15 s, under a collective 45 s."""
    job, others = trial.job, trial.others()
    if len(others) < 2:
        return  # a host is lost
    lost, before = job.lost(), len(job.notices("do not reach each other"))
    job.hosts.part(*others)
    try:
        _last(trial, 15 if trial.strategy == "ps" else 45)
    finally:
        job.hosts.part(*others, apart=False)
    assert len(job.notices("do not reach each other")) > before, "no notice names the two hosts"
    trial.wait_for_steps()
    _nothing_lost(trial, lost)


# ---- disks, clocks, logins, users ----------------------------------------------------------------------------------


def _no_checkpoint_until(trial: Trial, spoil: str, mend: str) -> None:
    """Spoil the head's disk of checkpoints until one fails, and mend it until one is written."""
    job, lost = trial.job, trial.job.lost()
    before = len(job.notices("was not written"))
    job.hosts.exec(job.head, ["sh", "-c", spoil], check=False)
    try:
        job.until(lambda: len(job.notices("was not written")) > before, "a notice of a checkpoint that failed")
    finally:
        job.hosts.exec(job.head, ["sh", "-c", mend])
    written = len(job.of("checkpoint"))
    job.until(lambda: len(job.of("checkpoint")) > written, "a checkpoint once there is space")
    _nothing_lost(trial, lost)


def full_disk(trial: Trial) -> None:
    """The head's disk is full."""
    _no_checkpoint_until(trial, f"cat /dev/zero > {CHECKPOINTS}/full", f"rm -f {CHECKPOINTS}/full")


def no_inodes(trial: Trial) -> None:
    """The head's disk can take no more files."""
    fill = f"mkdir -p {CHECKPOINTS}/full; i=0; while : > {CHECKPOINTS}/full/$i; do i=$((i + 1)); done"
    _no_checkpoint_until(trial, fill, f"rm -rf {CHECKPOINTS}/full")


def read_only(trial: Trial) -> None:
    """The head's disk becomes read-only."""
    _no_checkpoint_until(trial, f"mount -o remount,ro {CHECKPOINTS}", f"mount -o remount,rw {CHECKPOINTS}")


def clock(trial: Trial) -> None:
    """The clock of the head is set by years: status finds the job all the same."""
    job = trial.job
    moved = "sed 's/^btime .*/btime 1000000000/' /proc/stat > /run/stat && mount --bind /run/stat /proc/stat"
    job.hosts.exec(job.head, ["sh", "-c", moved])
    try:
        rows = job.psctl.run("status", job.job, "-o", "json", timeout=DEADLINE).document
    finally:
        job.hosts.exec(job.head, ["umount", "/proc/stat"])
    assert rows["jobs"][0]["state"] == "running", rows


def few_logins(trial: Trial) -> None:
    """sshd on the head takes two logins at once and one session each."""
    job = trial.job
    file = job.hosts.path(job.head, "/run/psctl-test/sshd_config")
    text = file.read_text()
    file.write_text(text.replace("MaxStartups 100", "MaxStartups 2\nMaxSessions 1"))
    os.kill(job.hosts[job.head].init, signal.SIGHUP)
    try:
        done = job.psctl.run("status", job.job, "-o", "json", timeout=DEADLINE)
        assert done.code == 0, done
    finally:
        file.write_text(text)
        os.kill(job.hosts[job.head].init, signal.SIGHUP)


def two_at_once(trial: Trial) -> None:
    """A second job and two more psctl at the same time."""
    if trial.gone:
        return  # a job is not started on a cluster with a host that is not reached
    psctl = trial.job.psctl
    second = psctl.start(
        "train", str(STEADY), "--cluster", str(trial.job.cluster), "--set", "name=second", "--workers", "1",
        "--servers", "1", *set_args("--epochs", "2"), "-o", "jsonl",
    )  # fmt: skip
    readers = [psctl.start("status", trial.job.job, "-o", "json"), psctl.start("jobs", "-o", "json")]
    for process in [*readers, second]:
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, f"{process.args}: exit {process.returncode}\n{out}\n{err}"


STRATEGIES = ("ps", "ring")


@dataclass(frozen=True)
class Fault:
    """A fault by its name in docs/failures.md.

    Args:
        name: of the row there.
        play: does it.
        weight: how often it is chosen, beside the others' weights.
        costs_host: no process of the job is on one of its hosts afterwards; a trial has one such fault at most.
        strategies: of the jobs that it is done to.
    """

    name: str
    play: Callable[[Trial], None]
    weight: int = 2
    costs_host: bool = False
    strategies: tuple[str, ...] = STRATEGIES


FAULTS = (
    Fault("kill-server", kill_server, 4, strategies=("ps",)),
    Fault("kill-worker", kill_worker, 4),
    Fault("kill-two-workers", kill_two_workers),
    Fault("kill-server-after-worker", kill_server_after_worker, strategies=("ps",)),
    Fault("kill-two-servers", kill_two_servers, strategies=("ps",)),
    Fault("stop-process", stop_process, 1),
    Fault("kill-agent", kill_agent, 1, costs_host=True),
    Fault("no-memory", no_memory),
    Fault("two-changes", two_changes, 1, strategies=("ps",)),
    Fault("kill-coordinator", kill_coordinator, 3),
    Fault("kill-psctl", kill_psctl, 1),
    Fault("power", power, 2, costs_host=True),
    Fault("head-power", head_power, 2, costs_host=True),
    Fault("boot", boot),
    Fault("cut-3s", cut_3s),
    Fault("cut-head", cut_head),
    Fault("cut-60s", cut_60s, 1, costs_host=True),
    Fault("flap", flap, 1),
    Fault("lossy", lossy),
    Fault("slow", slow, 1),
    Fault("one-way", one_way),
    Fault("partition", partition),
    Fault("full-disk", full_disk, 1),
    Fault("no-inodes", no_inodes, 1),
    Fault("read-only", read_only, 1),
    Fault("clock", clock, 1),
    Fault("few-logins", few_logins, 1),
    Fault("two-at-once", two_at_once, 1),
)
