"""The socket behind MASTER_PORT: bound by the head's agent, served by a small process once somebody connects."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

from psctl.errors import PortTaken
from psctl.words import Address

BACKLOG = 1024
"""Connections that may wait while the serving process imports torch: every rank of a large job at once."""


class StoreSocket:
    """A listening socket on the probed address.

    Args:
        host: numeric address.
        ports: inclusive range to take a port from; None: any.

    Raises:
        PortTaken: no port of the range is free.
        OSError: the address is not of this machine.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None) -> None:
        self._socket = _bind(host, ports)
        name = self._socket.getsockname()
        self.address = Address(name[0], name[1])

    @property
    def descriptor(self) -> int:
        """What the serving process inherits."""
        return self._socket.fileno()

    def watch(self, wanted: Callable[[], None]) -> None:
        """Call `wanted`, once, on another thread, when a connection waits that no process serves yet."""
        mine = os.dup(self.descriptor)  # so that closing ours does not pull the number away from under select

        def wait() -> None:
            select.select([mine], [], [])
            os.close(mine)
            wanted()

        threading.Thread(target=wait, name="psctl store", daemon=True).start()

    def close(self) -> None:
        """Nobody will be served any more: who connects is refused, once no serving process has the socket either."""
        self._socket.close()


def _bind(host: str, ports: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(BACKLOG)
            return made
        except OSError:
            made.close()
            if ports is None:
                raise
    raise PortTaken(
        f"no free port on {host} in {first}-{last}: all {last - first + 1} are in use",
        hint=f"see who holds them with `ss -ltnp`, or widen network.ports ({first}-{last})",
        where=host,
    )
