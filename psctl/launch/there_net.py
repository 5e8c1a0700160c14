"""What doctor tries on a host's network; a program sent along like there.py."""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

Question = dict[str, Any]


def ports(question: Question) -> Question:
    """Return how many ports of a range can be bound on an address."""
    free = 0
    for port in range(question["first"], question["last"] + 1):
        with socket.socket(socket.AF_INET6 if ":" in question["host"] else socket.AF_INET) as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe_socket.bind((question["host"], port))
                free += 1
            except OSError:
                continue
    return {"free": free}


def listen(question: Question) -> Question:
    """Accept `peers` connections on a port, for `seconds` at most; for the reach test of doctor."""
    family = socket.AF_INET6 if ":" in question["host"] else socket.AF_INET
    met = 0
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((question["host"], question["port"]))
        listener.listen(64)
        end = time.monotonic() + question["seconds"]
        while met < question["peers"] and time.monotonic() < end:
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                listener.accept()[0].close()
                met += 1
            except TimeoutError:
                break
    return {"met": met}


def reach(question: Question) -> Question:
    """Try to connect to every address until `seconds` are over; return for each "" or what went wrong."""
    answers = {}
    end = time.monotonic() + question["seconds"]
    for name, (host, port) in question["to"].items():
        while True:
            try:
                with socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())):
                    answers[name] = ""
            except OSError as error:
                answers[name] = error.strerror or str(error)
            # Refused may only mean that the listener is still starting.
            if not answers[name] or time.monotonic() >= end:
                break
            time.sleep(0.05)
    return answers


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"ports": ports, "listen": listen, "reach": reach}[verb](question)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
