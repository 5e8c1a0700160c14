"""Holds torch's store on a socket that the head's agent has bound and guards: the process behind MASTER_PORT.

The agent starts it at the first connection, so a job that needs no such store does not load torch here. The store
connects to itself like every client: HOST and PORT are the head's MASTER_ADDR and MASTER_PORT, and the socket has the
same port.

    python -m psctl.agent.torch_store_host DESCRIPTOR HOST PORT
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

from psctl.process import lifeline, torch_import


def main(descriptor: int, host: str, port: int) -> None:
    """Serve until the agent ends this process."""
    lifeline.arm()
    torch_import.arm()
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    limit = timedelta(seconds=300)
    try:
        store = TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor)
    except NotImplementedError:  # torch 2.6 and older take a socket with their older backend only
        store = TCPStore(
            host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=False
        )
    assert store.port == port, "the store serves the socket that it was given"
    while True:
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
