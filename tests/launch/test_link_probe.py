"""The link probe: the bytes that it counts, the clients that it answers, and two probes at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from psctl.launch.remote_programs import link_probe as link

HOST = "127.0.0.1"
LENGTH = 1.3


def flow(*rates: float, step: float = 0.01) -> link.Counted:
    """Counts of a flow whose rate changes at equal parts of 1.3 s."""
    steps = round(LENGTH / step)
    total, counted = 0.0, []
    for number in range(steps + 1):
        counted.append((100 + number * step, int(total)))
        total += rates[min(len(rates) - 1, number * len(rates) // steps)] * step
    return counted


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((1e8,), 1e8),
        ((1e6, *[1e8] * 12), 1e8),  # slow start
        ((1e9, *[1e8] * 12), 1e8),  # a bucket that is empty within the burn
        ((1e9, 1e9, 1e9, *[1e8] * 10), 1e8),  # and one that is not
        ((9e7, 1.1e8) * 6, 1e8),  # a flow that swings around its mean
    ],
)
def test_the_rate_is_that_of_the_steady_part(rates: tuple[float, ...], expected: float) -> None:
    assert link.steady(flow(*rates), 0.1) == pytest.approx(expected, rel=0.03)


def test_a_burst_of_more_than_half_the_time_is_not_distinguished_from_the_rate() -> None:
    assert link.steady(flow(*[1e9] * 10, *[1e8] * 3), 0.1) > 2e8


def test_bytes_between_two_counts_lie_on_a_line() -> None:
    counted: link.Counted = [(1.0, 0), (2.0, 100), (4.0, 200)]
    assert [link.bytes_at(counted, moment) for moment in (1.0, 1.5, 3.0, 9.0)] == [0, 50, 150, 200]


def question(**more: Any) -> link.Question:
    return {"name": "h1", "congestion": "auto", "listen": [HOST], "ports": None, "seconds": 30.0, **more}


@contextlib.contextmanager
def server(token: str, **more: Any) -> Iterator[link.Question]:
    """A server on a thread; yields what it says of its ports."""
    asked = question(**more)
    thread = threading.Thread(target=link.serve, args=(asked, token))
    thread.start()
    try:
        yield link.call_server("ports", {**asked, "seconds": 5.0}, token)
    finally:
        link.call_server("stop", {**asked, "seconds": 5.0}, token)
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture
def token() -> str:
    return os.urandom(8).hex()


def taken_beside_a_free_port() -> socket.socket:
    """Return a socket that listens on a port whose successor is free.

    It is below the range that the kernel takes ports from, so no other connection has the successor a moment later.
    """
    for first in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError):
            taken = socket.create_server((HOST, first))
            with contextlib.suppress(OSError), socket.create_server((HOST, first + 1)):
                return taken
            taken.close()
    raise AssertionError("of 100 ports below the kernel's own none and its successor were free")


def ask(port: int, **more: Any) -> link.Question:
    return {
        "to": [HOST, port], "from": HOST, "congestion": "auto", "seconds": 0.1, "burn": 0.02, "repeats": 2, "pings": 10,
        "streams": 1, **more,
    }  # fmt: skip


def test_clients_at_a_barrier_continue_when_the_last_has_arrived(token: str) -> None:
    order: list[str] = []
    with server(token) as said:
        meeting = {"to": [HOST, said["ports"][HOST]], "count": 2, "key": "1"}

        def come() -> None:
            link.meet(ask(0, meet=meeting), token, "out")
            order.append("went on")

        first = threading.Thread(target=come)
        first.start()
        first.join(0.05)
        order.append("last comes")
        come()
        first.join(link.PATIENCE)
    assert order == ["last comes", "went on", "went on"]
    link.meet(ask(0, meet=meeting), token, "in")  # the server is gone: nobody waits


@pytest.mark.parametrize("streams", [1, 3])
def test_a_way_is_measured_both_ways(token: str, streams: int) -> None:
    with server(token) as said:
        answer = link.dial(ask(said["ports"][HOST], streams=streams), token)
    assert 0 < answer["latency"] < 0.1
    assert len(answer["out"]) == len(answer["in"]) == 2
    assert all(rate > 1e6 for rate in answer["out"] + answer["in"])


def test_a_client_without_the_token_gets_nothing(token: str) -> None:
    with server(token) as said:
        port = said["ports"][HOST]
        with pytest.raises(ConnectionError):
            link.dial(ask(port), "another")
        with socket.create_connection((HOST, port), 5) as stranger:
            assert len(json.loads(stranger.makefile().readline())) == 32
            stranger.sendall(b'"guess"\n')
            assert stranger.recv(100) == b""
        assert link.reach({**ask(port), "to": {"a": [HOST, port]}, "seconds": 2.0}, token)["a"]["latency"] > 0


def test_an_answer_to_one_challenge_is_none_to_the_next(token: str) -> None:
    with server(token) as said:
        nonces, answers = [], []
        for _ in range(2):
            with socket.create_connection((HOST, said["ports"][HOST]), 5) as asking:
                nonces.append(json.loads(asking.makefile().readline()))
                words = [link.proof(token, nonces[0]), {"do": "echo", "count": 1}]
                asking.sendall("".join(json.dumps(word) + "\n" for word in words).encode())
                with contextlib.suppress(ConnectionResetError):
                    answers.append(asking.recv(100))
        assert answers[0] == b'"yes"\n'
        assert answers[1:] in ([], [b""])


def test_two_servers_of_a_range_take_two_ports_and_a_third_reports_why_not(token: str) -> None:
    with taken_beside_a_free_port() as taken:
        first = taken.getsockname()[1]
        with server(token, name="h1", ports=[first, first + 1]) as one:
            assert one["ports"][HOST] == first + 1
            with server(token, name="h2", ports=[first, first + 1]) as other:
                assert other["ports"] == {}
                assert "in use" in other["failed"][HOST]


def test_an_address_of_another_machine_is_reported(token: str) -> None:
    with server(token, listen=[HOST, "192.0.2.1"]) as said:
        assert list(said["ports"]) == [HOST]
        assert "192.0.2.1" in said["failed"]


def test_many_addresses_are_tried_at_once(token: str) -> None:
    with socket.create_server((HOST, 0)) as silent, socket.socket() as closed, server(token) as said:
        closed.bind((HOST, 0))
        to = {
            "good": [HOST, said["ports"][HOST]], "closed": list(closed.getsockname()),
            "silent": list(silent.getsockname()),
        }  # fmt: skip
        found = link.reach({**ask(0), "to": to, "seconds": 0.2, "patience": 0.2}, token)
    assert found["good"]["latency"] > 0
    assert "refused" in found["closed"]["error"]
    assert "error" in found["silent"]


def test_a_server_ends_by_itself(token: str) -> None:
    assert link.serve(question(seconds=0.01), token) == {}
    with pytest.raises((FileNotFoundError, ConnectionError)):
        link.call_server("ports", question(seconds=0.0), token)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_another_user_of_the_host_cannot_stop_the_server_or_hold_it_up() -> None:
    with server("right"):
        name = link.control_name(question(), "right")
        code = (
            "import socket, sys\nmade = socket.socket(socket.AF_UNIX)\n"
            "made.connect('\\0' + sys.argv[1])\nmade.settimeout(10)\n"
            "try:\n    made.sendall(b'\"stop\"\\n')\n    print(made.recv(100))\nexcept OSError:\n    print(b'')\n"
        )
        done = subprocess.run(
            ["python3", "-c", code, name[1:]],
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            check=False,
        )
        assert done.stdout == b"b''\n", done.stderr
        assert link.call_server("ports", question(seconds=5.0), "right")["ports"]


def test_connections_that_show_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNPROVEN", 2)
    with server("right") as word, contextlib.ExitStack() as opened:
        address = (HOST, word["ports"][HOST])
        silent = [opened.enter_context(socket.create_connection(address, 5)) for _ in range(2)]
        for line in silent:
            assert line.recv(1)
        assert opened.enter_context(socket.create_connection(address, 5)).recv(1) == b"", "a third finds no room"
        silent[0].close()
