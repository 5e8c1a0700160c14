"""The server of the live page: the request it answers, those it refuses, and the changes it sends."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from psctl.errors import PortTaken
from psctl.page.board import Board
from psctl.page.changes import apply_change
from psctl.page.history import JobHistory
from psctl.page.server import PageServer
from tests.page.sample import job_events


class Served:
    """A served board with one job, and a job that can be opened."""

    def __init__(self) -> None:
        self.board = Board()
        self.board.add(JobHistory("mine-1", "lab"))
        self.server = PageServer(self.board, 0, self.open, self.steps)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def open(self, name: str) -> bool:
        return name == "other-1" and self.board.add(JobHistory(name, "lab"))

    def steps(self, name: str) -> str:
        if name != "mine-1":
            return f"{name} does not run"
        self.board.set_steps(name, {"lanes": {}})
        return ""

    def ask(self, path: str, method: str = "GET", host: str = "") -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{self.server.port}"})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), dict(answer.headers)
        connection.close()
        return found


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.stop()
    made.thread.join()


def test_the_page_is_given_to_those_that_know_the_token(served: Served) -> None:
    path = served.server.url.partition(f":{served.server.port}")[2]
    status, text, headers = served.ask(path)
    assert (status, headers["Cache-Control"], headers["X-Frame-Options"]) == (200, "no-store", "DENY")
    assert '"mine-1"' in text
    assert served.ask(path, host=f"localhost:{served.server.port + 1}")[0] == 200, "through ssh -L"


@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%ff", "?other=1"])
@pytest.mark.parametrize("path", ["/", "/changes", "/etc/passwd"])
def test_a_request_without_the_token_is_refused(served: Served, path: str, query: str) -> None:
    status, text, _ = served.ask(path + query)
    assert status == 403
    assert "mine-1" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1:80"])
def test_a_name_that_was_made_to_resolve_to_this_machine_is_refused(served: Served, host: str) -> None:
    assert served.ask(f"/?token={served.server.token}", host=host)[0] == 403


def test_a_known_job_is_opened_and_an_unknown_one_is_not(served: Served) -> None:
    token = served.server.token
    assert served.ask(f"/open?job=other-1&token={token}", "POST")[0] == 204
    assert set(served.board.document()[1]["jobs"]) == {"mine-1", "other-1"}
    assert served.ask(f"/open?job={urllib.parse.quote('../x')}&token={token}", "POST")[0] == 404
    assert served.ask("/open?job=other-1", "POST")[0] == 403
    assert served.ask(f"/nothing?token={token}")[0] == 404


def test_changes_add_up_to_what_the_board_has(served: Served) -> None:
    found = job_events("mine-1")
    for event in found[:50]:
        served.board.apply("mine-1", event)
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=20)
    connection.request("GET", f"/changes?token={served.server.token}")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    held: object = None

    def read() -> object:
        line = answer.readline()
        while not line.startswith(b"data: "):
            line = answer.readline()
        return apply_change(held, json.loads(line[6:]))

    held = read()
    for event in found[50:]:
        served.board.apply("mine-1", event)
    served.board.set_problem("mine-1", "node-0 is not reached")
    wanted = json.loads(json.dumps(served.board.document()[1]))
    while held != wanted:
        held = read()
    assert wanted["jobs"]["mine-1"]["problem"] == "node-0 is not reached"
    connection.close()


def test_a_port_that_another_process_holds_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=str(port)) as caught:
            PageServer(Board(), port, lambda name: False, lambda name: "")
    assert caught.value.exit == 7


def test_the_newest_steps_are_read_when_the_page_asks(served: Served) -> None:
    token = served.server.token
    assert served.ask(f"/steps?job=mine-1&token={token}", "POST")[:2] == (200, "")
    assert served.board.document()[1]["jobs"]["mine-1"]["steps"] == {"lanes": {}}
    assert served.ask(f"/steps?job=other-1&token={token}", "POST")[:2] == (200, "other-1 does not run")
    assert served.ask("/steps?job=mine-1", "POST")[0] == 403
