"""Serves the live page on the loopback address, to those only that know its token.

A request needs the token, and a Host that names this machine: a page of another site whose name was made to resolve to
127.0.0.1 has neither. Changes are sent as server-sent events.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from psctl.errors import PortTaken
from psctl.page.board import Board
from psctl.page.changes import change_between
from psctl.page.render import render
from psctl.types import Document

ADDRESS = "127.0.0.1"
PACE = 0.5
"""Seconds between two changes that are sent."""

HEARTBEAT = 10.0
"""Seconds without a change after which a comment is sent: it finds out that the page was closed."""

NAMES = ("127.0.0.1", "localhost", "[::1]")


class PageServer:
    """The server; `serve` runs until `stop`.

    Args:
        board: the jobs to show.
        port: the port; 0: any free one.
        open_job: called with the name of a job that the page asks for; returns False when there is no such job.
        show_steps: called with the name of a job whose newest steps the page asks for; returns why it cannot, or "".

    Raises:
        PortTaken: another process listens there.
    """

    def __init__(
        self, board: Board, port: int, open_job: Callable[[str], bool], show_steps: Callable[[str], str]
    ) -> None:
        self.board = board
        self.token = secrets.token_urlsafe(24)
        self.open_job, self.show_steps = open_job, show_steps
        self.stopping = False
        try:
            self._http = _Server((ADDRESS, port), self)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise PortTaken(
                f"port {port} of this machine cannot be used: {error.strerror}",
                hint="leave --port out to use a free one", where=f"{ADDRESS}:{port}",
            ) from None  # fmt: skip

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page, token included."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Answer requests until `stop`."""
        self._http.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `serve`, and close the port."""
        self.stopping = True
        self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: PageServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a page that was closed is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "psctl", ""
    timeout = 60

    server: _Server

    def do_GET(self) -> None:  # the name that http.server calls
        where = self._admitted()
        if where is None:
            return
        if where == "/":
            _, document = self.server.owner.board.document()
            self._answer(200, "text/html; charset=utf-8", render(document, title="psctl", live=True).encode())
        elif where == "/changes":
            self._send_changes()
        else:
            self._answer(404, "text/plain", b"no such page\n")

    def do_POST(self) -> None:  # the name that http.server calls
        where = self._admitted()
        if where is None:
            return
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        job, owner = query.get("job", [""])[0], self.server.owner
        if where == "/steps":
            self._answer(200, "text/plain; charset=utf-8", owner.show_steps(job).encode())
        elif where == "/open" and owner.open_job(job):
            self._answer(204, "text/plain", b"")
        else:
            self._answer(404, "text/plain", b"no such job\n")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal is the user's."""

    def _admitted(self) -> str | None:
        """Return the path that is asked for; None when the request was refused."""
        url = urllib.parse.urlsplit(self.path)
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        given = urllib.parse.parse_qs(url.query).get("token", [""])[0]
        if name in NAMES and hmac.compare_digest(given.encode(), self.server.owner.token.encode()):
            return url.path
        self._answer(403, "text/plain", b"open the address that psctl ui printed, with its token\n")
        return None

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self._send_common(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_common(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")

    def _send_changes(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self._send_common("text/event-stream")
        self.end_headers()
        owner, seen, sent = self.server.owner, -1, None
        with contextlib.suppress(OSError):  # the page was closed
            while not owner.stopping:
                if not owner.board.wait(seen, HEARTBEAT):
                    self._write(b": still here\n\n")
                    continue
                seen, document = owner.board.document()
                sent = self._send_change(sent, document)
                time.sleep(PACE)

    def _send_change(self, sent: Document | None, document: Document) -> Document:
        change = change_between(sent, document)
        if change is not None:
            self._write(b"data: " + msgspec.json.encode(change) + b"\n\n")
        return document

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()
