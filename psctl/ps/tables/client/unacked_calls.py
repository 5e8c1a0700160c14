"""What a worker has said and not all shards have, by sequence, and asked and not all have answered, by ticket."""

from __future__ import annotations

from collections.abc import Iterator

from psctl.ps.outputs import ToServer
from psctl.ps.table_messages import TableDescribed
from psctl.ps.tables.client.calls_in_flight import ServerSession, TableChange

NOBODY = -1
"""The ticket of what nobody waits for; the server that leads what none does."""


class UnackedChanges:
    """Changes."""

    def __init__(self) -> None:
        self.kept = 0
        """Bytes of rows that are kept until servers have them."""
        self._changes: dict[int, TableChange] = {}  # in order
        self._parts: dict[int, int] = {}  # by ticket: changes that are not done

    def __iter__(self) -> Iterator[TableChange]:
        return iter(self._changes.values())

    def __bool__(self) -> bool:
        return bool(self._changes)

    def expect(self, ticket: int, changes: int) -> None:
        """A ticket is finished when so many changes are done."""
        self._parts[ticket] = changes

    def add(self, change: TableChange) -> None:
        """Keep a change until it is done."""
        self._changes[change.sequence] = change

    def on_done(self, sequence: int, shards: list[int]) -> list[TableChange]:
        """These shards have all up to a sequence; return what all have now."""
        done = []
        for change in self._changes.values():
            if change.sequence > sequence:
                break
            for shard in shards:
                change.shards.pop(shard, None)
            if not change.shards:
                done.append(change)
        for change in done:
            del self._changes[change.sequence]
            self.kept -= change.bytes
        return done

    def finished_tickets(self, change: TableChange) -> list[int]:
        """Return the tickets that a change which is done was the last of."""
        if change.ticket == NOBODY:
            return change.singles
        self._parts[change.ticket] -= 1
        if self._parts[change.ticket]:
            return []
        del self._parts[change.ticket]
        return [change.ticket]

    def shards_waited_for(self, ticket: int) -> set[int]:
        """Return the shards that a ticket waits for."""
        its = [change for change in self if ticket == change.ticket or ticket in change.singles]
        return {shard for change in its for shard in change.shards}


class OpenDescriptions:
    """What tables are (Describe): by ticket, which, and the shards that have not answered."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, set[int]]] = {}

    def ask(self, ticket: int, table: str, shards: set[int]) -> None:
        """Have a question put to all shards."""
        self._open[ticket] = table, shards

    def resend(self, voice: ServerSession, shards: set[int]) -> list[ToServer]:
        """Return what is to be asked of shards that a server leads now."""
        return [
            out for ticket, (table, left) in self._open.items() for out in voice.describe(ticket, table, shards & left)
        ]

    def shards_waited_for(self, ticket: int) -> set[int]:
        """Return the shards that have not answered."""
        return self._open.get(ticket, ("", set()))[1]

    def on_answer(self, message: TableDescribed) -> bool:
        """Some shards have answered; tell whether these were the last."""
        left = self.shards_waited_for(message.ticket)
        last = bool(left) and left <= set(message.shards)
        left.difference_update(message.shards)
        if last:
            del self._open[message.ticket]
        return last
