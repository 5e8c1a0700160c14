"""One training with some faults: chosen by a seed, and compared with an undisturbed run, to the bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.job_on_hosts import JobOnHosts
from tests.torture.faults import CHECKPOINTS, FAULTS, Fault

LEAST, MOST = 3, 7
"""Faults of a trial."""

PAUSE = 0.2
"""Seconds a step takes at least, so that an undisturbed run of a minute is ahead of all trials."""


def choose_strategy(chance: random.Random) -> str:
    """Return the strategy of a trial's job."""
    return chance.choice(["ps", "ps", "ring"])


def choose(chance: random.Random, only: Sequence[str] = (), strategy: str = "ps") -> list[Fault]:
    """Return the faults of a trial, in order; at most one of them costs a host."""
    pool = [fault for fault in FAULTS if strategy in fault.strategies and (not only or fault.name in only)]
    chosen: list[Fault] = []
    for _ in range(chance.randint(LEAST, MOST)):
        free = [fault for fault in pool if not (fault.costs_host and any(each.costs_host for each in chosen))]
        if not free:
            break
        chosen += chance.choices(free, [fault.weight for fault in free])
    return chosen


class Trial:
    """A job that trains on three hosts, and what has happened to it.

    Args:
        hosts: three test hosts; each gets a worker and a server.
        folder: for psctl's home on the driving side.
        chance: chooses processes, hosts and moments.
        rate: of every link, as tc writes it.
        strategy: of the job.
    """

    def __init__(self, hosts: Any, folder: Path, chance: random.Random, rate: str, strategy: str) -> None:
        self.chance, self.rate, self.strategy = chance, rate, strategy
        for host in hosts:  # each may lead
            hosts.disk(host, CHECKPOINTS, "4m,nr_inodes=200")
        self.job = JobOnHosts(hosts, folder)
        self.lost_hosts: list[str] = []
        self.gone: list[str] = []
        """Hosts without power, of the lost ones."""

    def hosts(self) -> list[str]:
        """The hosts that are not lost."""
        return [name for name in self.job.hosts if name not in self.lost_hosts]

    def others(self) -> list[str]:
        """The same without the head."""
        return [name for name in self.hosts() if name != self.job.head]

    def losses_of(self, host: str) -> int:
        """The reports so far of the loss of a host, or of a process there; nothing of the job may be on it."""
        lost = [event for event in self.job.of("worker-lost", "server-lost") if event["host"] == host]
        return len(lost) + len(self.job.notices(f"{host} is lost"))

    def wait_for_steps(self) -> None:
        """Wait until more steps are done."""
        self.job.wait_for_steps(5)

    def made_good(self) -> None:
        """Wait until all that was lost is made good: replicas, servers, workers."""
        self.job.until(self.job.is_recovered, "the replacement of all that was lost")

    def run(
        self, faults: Sequence[Fault], reference: Mapping[int, str], say: Callable[[str], None]
    ) -> list[tuple[str, float]]:
        """Train, do all faults, stop, and compare.

        Returns:
            each fault with the seconds from its begin until training went on, which include the time that it lasted.

        Raises:
            AssertionError: a promise is broken; says which and after which fault.
        """
        more = () if self.strategy == "ps" else ("--servers", "0", "--set", "replicas=auto")
        more = (*more, "--set", f"sync.strategy={self.strategy}", "--set", "checkpoint.every=20 steps")
        self.job.train(*more, pause=PAUSE, words_more=("--keep-pace",))
        times: list[tuple[str, float]] = []
        for fault in faults:
            self.job.wait_for_steps(self.chance.randrange(1, 12))
            began = time.monotonic()
            try:
                fault.play(self)
                self.wait_for_steps()
                times.append((fault.name, time.monotonic() - began))
                self.made_good()
            except AssertionError as error:
                raise AssertionError(f"{fault.name}: {error}") from error
            say(f"    {fault.name}: went on after {times[-1][1]:.1f} s")
        compared = self.job.stop_and_compare(reference, tuple(self.gone))
        for host in self.job.hosts:
            if host not in self.gone:
                self.job.hosts.exec(host, ["umount", CHECKPOINTS])
        self.job.check_clean(tuple(self.gone))
        done = len(self.job.values())
        say(f"    {compared} of {done} epochs compared, {len(self.job.of('restored'))} times back to a checkpoint")
        return times
