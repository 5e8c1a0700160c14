"""Pushes and pulls of one key each: the short way, for they may come by the thousand.

What they do is what any push or pull does; what is left out is what one key does not need. They leave in groups
(ps/tables/client/single_key_batches.py). None where that is not the way: the key is new, waits for others, or its
row is large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psctl.kv.store_session import KEPT, StoreEnd
from psctl.kv.store_values import rows_of
from psctl.kv.tickets import Ticket
from psctl.ps.tables.client.calls_in_flight import Out
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.row_index import LEAST, MOST
from psctl.ps.tables.table_kinds import Kind


class SingleKeys(StoreEnd):
    """See the module; `Store` stands on it."""

    def _push_one(self, key: Any, value: Any, callback: Callable[[Any], Any] | None) -> Ticket | None:
        with self._changed:
            kind = self._one(key)
            if kind is None or value is None:
                return None
            self._check(writes=True)
            if self._mind.outstanding.kept >= KEPT:
                self._wait_for_room()
            lanes = _row(kind, key, value)
            ticket = self._begun("push", key, callback)
            name = isinstance(key, str)
            outs = self._mind.push_one(kind, 0 if name else key, lanes, ticket.number, self._at.place)
            self._leave(outs)
        self._call_back()
        return ticket

    def _fetch_one(self, key: Any, callback: Callable[[Any], Any] | None) -> Ticket | None:
        with self._changed:
            kind = self._one(key)
            if kind is None or kind.reduction.beside == "index":
                return None
            self._check()
            ticket = self._begun("pull", key, callback)
            outs = self._mind.read_one(kind, 0 if isinstance(key, str) else key, ticket.number)
            self._leave(outs)
        self._call_back()
        return ticket

    def _leave(self, outs: Sequence[Out]) -> None:
        if outs:
            self._send(outs)
        if self._mind.finished:
            self._go_on()

    def _one(self, key: Any) -> Kind | None:
        if key == "":  # no name: the table of integer keys is called so
            return None
        kind = self._mind.kinds.get(key if isinstance(key, str) else "")
        fit = kind is not None and kind.single and (isinstance(key, str) or LEAST <= key <= MOST)
        return kind if fit and self._tasks.delay is None else None

    def _begun(self, verb: str, key: Any, callback: Callable[[Any], Any] | None) -> Ticket:
        """Return the ticket of a task that begins at once."""
        self._numbers += 1
        ticket = Ticket(self._numbers, (verb, key), self._wait_ticket)
        if callback is not None:
            ticket.then(callback)
        self._tasks.open(ticket)
        return ticket


def _row(kind: Kind, key: Any, value: Any) -> Lanes:
    """Return what a push of one key contributes, in the script's own memory where it lies as it should."""
    if (
        kind.joins_values
        and type(value) is torch.Tensor
        and value.dtype is kind.dtype
        and value.shape == kind.spec.shape
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_neg()
    ):
        return Lanes((value.detach() if value.requires_grad else value).reshape(1, -1))
    return rows_of(kind, key, value, 1)
