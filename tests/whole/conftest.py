"""Fixtures of tests on the project's own test hosts; see hosts.py beside this file.

make_hosts(names=3, ...) -> Hosts      any number of times in one test; all removed at its end
module_hosts(names=3, ...) -> Hosts    the same, removed after the module's last test
hosts      three of them: h1, h2, h3
home       a home folder for psctl on the driving side: ssh knows the hosts by name, home.env is the environment
lab        psctl at that home, the three hosts, and a cluster file of them
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import hosts as library
from tests.helpers.running import Psctl

RATE = "500mbit"
"""Of links for which a test names no rate: measuring free ones keeps the processors busy (3 s among three hosts)."""


def _make_hosts() -> Iterator[Callable[..., Any]]:
    """Make test hosts with namespaces; the test is skipped, with the reason, where that cannot be."""
    if reason := library.missing():
        pytest.skip(reason)
    with contextlib.ExitStack() as made:
        yield lambda *args, **options: made.enter_context(library.Hosts(*args, **{"rate": RATE, **options}))


make_hosts = pytest.fixture(_make_hosts, name="make_hosts")
module_hosts = pytest.fixture(_make_hosts, name="module_hosts", scope="module")


@pytest.fixture
def hosts(make_hosts: Callable[..., Any]) -> Any:
    """Three test hosts."""
    return make_hosts(3)


@pytest.fixture
def home(hosts: Any, tmp_path: Path) -> Any:
    """A home for psctl on the driving side of `hosts`."""
    return hosts.make_home(tmp_path / "home")


@pytest.fixture
def lab(hosts: Any, home: Any) -> tuple[Psctl, Any, Path]:
    """psctl on the driving side, three hosts, and a cluster file of them."""
    cluster = home.path / "cluster.yaml"
    cluster.write_text(hosts.cluster_text())
    return Psctl(home.path, environment=home.env), hosts, cluster


@pytest.fixture
def make_loopback() -> Iterator[Callable[..., Any]]:
    """Make the stand-in for machines without root: sshd on 127.0.0.2, 127.0.0.3 ... with homes of their own."""
    if reason := library.missing_for_loopback():
        pytest.skip(reason)
    with contextlib.ExitStack() as made:
        yield lambda *args, **options: made.enter_context(library.Loopback(*args, **options))
