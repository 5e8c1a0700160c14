"""Sends one command to a job's agent over its socket, and prints the answer, one JSON document.

    python -m psctl.agent.control_client JOB_DIR hello|state|stop|scale|read|stacks [JSON]

Exit 0 with the answer, or 1 with {"error": {"code", "message"}}; code `gone`: no agent listens there.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "agent.sock"


def connect(job_dir: str, timeout: float = 20.0) -> socket.socket:
    """Return a connection to the agent of this job folder.

    The path may be longer than the 108 bytes that a socket's address holds, so it goes through the folder's descriptor.

    Raises:
        OSError: no agent listens there.
    """
    folder = os.open(job_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout)
        made.connect(f"/proc/self/fd/{folder}/{SOCKET}")
    except BaseException:
        made.close()
        raise
    finally:
        os.close(folder)
    return made


def call(job_dir: str, command: str, arguments: dict[str, object]) -> dict[str, object]:
    """Return the agent's answer, or {"error": ...}."""
    try:
        with connect(job_dir) as made, made.makefile("rwb") as file:
            file.write(json.dumps({"command": command, "arguments": arguments}).encode() + b"\n")
            file.flush()
            line = file.readline()
    except OSError as error:
        return {"error": {"code": "gone", "message": f"no agent listens in {job_dir}: {error.strerror or error}"}}
    if not line:
        return {"error": {"code": "gone", "message": f"the agent in {job_dir} ended before it answered"}}
    found: dict[str, object] = json.loads(line)
    return found


def main(argv: list[str]) -> int:
    """Send the command of the command line; return the exit status."""
    if len(argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    answer = call(argv[0], argv[1], json.loads(argv[2]) if len(argv) == 3 else {})
    print(json.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
