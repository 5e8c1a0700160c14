"""Shells on the hosts of a cluster: connects and runs functions on many at once; an error of one host is its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Generic, TypeVar

from psctl.errors import AllocationEnded, PsctlError, TimedOut
from psctl.remote import slurm
from psctl.remote.command import CommandShell
from psctl.remote.local import LocalShell
from psctl.remote.shell import Shell, TransferMeter
from psctl.remote.target import Target, resolve
from psctl.spec.cluster import HOST_PLACE, ClusterSpec, HostSpec
from psctl.spec.exec_template import ExecTemplate
from psctl.types import HostName

T = TypeVar("T")

AT_ONE_SSHD = 8
"""Simultaneous logins at one sshd, such as a jump host for all hosts. OpenSSH starts to drop logins above ten."""


class Outcome(Generic[T]):
    """The result for one host: a value, or an error."""

    def __init__(self, value: T | None = None, error: PsctlError | None = None) -> None:
        self._value, self.error = value, error

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return self.error is None

    @property
    def value(self) -> T:
        """The value; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"Outcome({self._value!r})" if self.error is None else f"Outcome(error={self.error!r})"


class _Gates:
    """A semaphore for each first sshd, which limits the simultaneous logins there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[tuple[str, int], threading.Semaphore] = {}

    def of(self, target: Target) -> threading.Semaphore:
        first = (target.first.address, target.first.port)
        with self._lock:
            return self._gates.setdefault(first, threading.Semaphore(AT_ONE_SSHD))


class Fleet:
    """Shells by host name; `failed` has the errors of hosts without one. A context manager that closes them."""

    def __init__(self, shells: dict[HostName, Shell], failed: dict[HostName, PsctlError], forks: int = 16) -> None:
        self.shells, self.failed = shells, failed
        self._forks = max(1, forks)

    @classmethod
    def connect(
        cls,
        cluster: ClusterSpec,
        forks: int = 16,
        timeout: float | None = None,
        config: Path | None = None,
        names: Iterable[str] | None = None,
        meter: TransferMeter | None = None,
    ) -> Fleet:
        """Connect to the hosts, many at once.

        Args:
            cluster: whose hosts, and how they are reached; one with the address `local` is this machine.
            forks: hosts at once; at most AT_ONE_SSHD of them log in through one jump host at a time.
            timeout: seconds for each host, beside connect_timeout of each hop; None: no other limit.
            config: another file than ~/.ssh/config.
            names: these hosts only.
            meter: shows the progress of files that are transferred.

        Returns:
            A fleet with a shell or an error for each host; nothing is raised for a host that cannot be reached.
        """
        gates, chosen = _Gates(), None if names is None else set(names)
        hosts = [host for host in cluster.hosts if chosen is None or host.name in chosen]
        made: list[Shell] = []
        given_up = threading.Event()

        def reach(host: HostSpec) -> Shell:
            shell = _reach(cluster, host, gates, config, timeout)
            shell.meter = meter
            made.append(shell)
            if given_up.is_set():
                shell.close()
            return shell

        try:
            outcomes = _together({HostName(host.name): (reach, (host,)) for host in hosts}, forks)
        except BaseException:
            given_up.set()
            for shell in list(made):
                shell.close()
            raise
        failed = {name: outcome.error for name, outcome in outcomes.items() if outcome.error is not None}
        return cls({name: outcome.value for name, outcome in outcomes.items() if outcome.ok}, failed, forks)

    def shell(self, name: str) -> Shell:
        """Return the shell of a host; raises the error of a host that was not reached."""
        if HostName(name) in self.failed:
            raise self.failed[HostName(name)]
        return self.shells[HostName(name)]

    def each(
        self, fn: Callable[[HostName, Shell], T], names: Iterable[str] | None = None
    ) -> dict[HostName, Outcome[T]]:
        """Call a function for every host (or these), many at once.

        Args:
            fn: called with name and shell, on a thread of its own; a PsctlError that it raises is that host's outcome.
            names: hosts to do it on; one that was not reached has its error as outcome.

        Returns:
            An outcome a host, in the order of the names. After Ctrl-C the connections of unfinished hosts are closed,
            which ends what `run` was doing there.
        """
        order = [*self.shells, *self.failed] if names is None else [HostName(name) for name in names]
        calls = {name: (fn, (name, self.shells[name])) for name in order if name in self.shells}

        def stop(name: HostName) -> None:
            self.shells[name].close()

        done = _together(calls, self._forks, stop)
        return {name: done[name] if name in done else Outcome(error=self.failed[name]) for name in order}

    def lend(self, names: Iterable[str] | None = None) -> LentFleet:
        """Return the shells and errors of these hosts (None: all) for another use of the open connections."""
        wanted = {*self.shells, *self.failed} if names is None else {HostName(name) for name in names}
        shells = {name: shell for name, shell in self.shells.items() if name in wanted}
        failed = {name: error for name, error in self.failed.items() if name in wanted}
        return LentFleet(shells, failed, self._forks)

    def close(self) -> None:
        """Close all connections."""
        _together({name: (shell.close, ()) for name, shell in self.shells.items()}, self._forks)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LentFleet(Fleet):
    """Shells of another fleet, whose owner closes them."""

    def close(self) -> None:
        """Leave the connections open."""


def target_of(cluster: ClusterSpec, host: HostSpec, config: Path | None = None) -> Target:
    """Resolve a host of a cluster file; raises as `resolve`."""
    ssh = cluster.ssh
    return resolve(
        host.name, host.address, user=host.user or ssh.user, port=host.port or ssh.port,
        identity_file=ssh.identity_file, proxy_jump=ssh.proxy_jump, policy=ssh.host_key_policy,
        connect_timeout=ssh.connect_timeout, config=config,
    )  # fmt: skip


def _reach(cluster: ClusterSpec, host: HostSpec, gates: _Gates, config: Path | None, timeout: float | None) -> Shell:
    if host.local:
        return LocalShell(host.name)
    if cluster.kind == "command":
        template = ExecTemplate.parse(cluster.exec or "")
        return CommandShell.connect(host.name, host.address, template, timeout, steps=cluster.steps)
    if cluster.kind == "slurm":
        return _reach_node(cluster, host, timeout)
    from psctl.remote.ssh import SshShell  # paramiko takes 0.2 s to load, which a cluster of `local` need not pay

    deadline = None if timeout is None else time.monotonic() + timeout
    target = target_of(cluster, host, config)
    gate = gates.of(target)
    if not gate.acquire(timeout=None if deadline is None else max(0.0, deadline - time.monotonic())):
        raise TimedOut(
            f"{host.name}: no turn to log in within {timeout:g} s", "allow more time: --timeout", where=host.name
        )
    try:
        return SshShell.connect(target, deadline=deadline)
    finally:
        gate.release()


def _reach_node(cluster: ClusterSpec, host: HostSpec, timeout: float | None) -> Shell:
    """Reach a node of Slurm; once its allocation has ended, its files, where this machine shares the disk.

    Nothing new begins there then: `choose_cluster` takes an allocation that psctl runs in.
    """
    try:
        return slurm.connect(host.name, host.address, cluster.allocation, timeout)
    except AllocationEnded:
        if not Path(cluster.runtime.workdir.replace(HOST_PLACE, host.name)).expanduser().is_dir():
            raise
        return LocalShell(host.name)


def _together(
    calls: Mapping[HostName, tuple[Callable[..., T], tuple[object, ...]]],
    forks: int,
    stop: Callable[[HostName], None] | None = None,
) -> dict[HostName, Outcome[T]]:
    """Make all calls, at most `forks` at once; a PsctlError is an outcome, anything else is ours and is raised."""
    if not calls:
        return {}
    pool = ThreadPoolExecutor(max_workers=min(max(1, forks), len(calls)), thread_name_prefix="psctl-fleet")
    futures: dict[HostName, Future[Outcome[T]]] = {}
    try:
        for name, (fn, arguments) in calls.items():
            futures[name] = pool.submit(_outcome, fn, arguments)
        # in short waits: a signal that another thread took is noticed too
        while wait(futures.values(), timeout=0.5, return_when=FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures.values()):
                break
        for future in futures.values():
            if future.done() and (error := future.exception()) is not None:
                raise error
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for name, future in futures.items():
            if stop is not None and future.running():
                stop(name)
        raise
    pool.shutdown()
    return {name: future.result() for name, future in futures.items()}


def _outcome(fn: Callable[..., T], arguments: tuple[object, ...]) -> Outcome[T]:
    try:
        return Outcome(fn(*arguments))
    except PsctlError as error:
        return Outcome(error=error)
