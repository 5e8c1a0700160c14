"""The mind of a server's tables: messages of workers and servers in, messages out; it never waits, knows no network.

It holds, for each shard that it leads or has a replica of, that shard of every store (table_shard.py), and for each
worker what the worker has told and read (client_sessions.py). An update is split by shard; in each it is applied by who
leads the shard, goes down the shard's chain of replicas (chain.py), and is Done when all of the chain have it; nothing
that rests on it is told before (held_answers.py). So a server's death loses nothing that anybody was told of, and what
was not Done is said again to the next of the chain.

A read that wants clock r is answered once all of the group have finished r clocks: the server's half of SSP's cache
rule (Ho and others 2013: a row with clock r may be read at clock c iff r >= c - s).

Exactly once: an update's sequence is larger than those of its worker before; in each shard one that is not is only
acknowledged again. That holds if a shard hears a worker's updates without a gap: so a worker says nothing of a shard
before it is told that it is led here (Leads), then all that is not Done; by `term` what it sent before is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from psctl.errors import ProtocolError, UsageError
from psctl.ps.outputs import CaughtUp, HandedOver, Load, Save, ToServer
from psctl.ps.replication.chain_entries import Copying
from psctl.ps.table_messages import (
    Advance,
    Because,
    Describe,
    Described,
    Done,
    Fetch,
    KeysUnknown,
    Leads,
    Mark,
    Open,
    Refused,
    TableBetween,
    Update,
    Why,
)
from psctl.ps.tables.row_index import NO_KEYS
from psctl.ps.tables.server.client_sessions import Opened, Session, Unknown, Waiting, open_store
from psctl.ps.tables.server.held_answers import Outbox, Send
from psctl.ps.tables.server.read_answers import Answers
from psctl.ps.tables.server.replicated_tables import Head
from psctl.ps.tables.server.saved_tables import load
from psctl.ps.tables.server.snapshot_reads import Readers
from psctl.ps.tables.server.table_checkpoint_parts import Cuts
from psctl.ps.tables.server.table_shard import Slot, Work
from psctl.ps.tables.table_kinds import Functions
from psctl.ps.tables.table_packing import Reader, Room, private
from psctl.ps.tables.table_state import FOREVER, Entry, Part

Output = Send | ToServer | CaughtUp | HandedOver | Save | Load


class TableMind:
    """All tables of one server. Its calls must not overlap.

    Args:
        rank: this server's.
        functions: reductions and users' functions.
        shards: how many each store has.
        room: where the memory of answers comes from.
    """

    def __init__(self, rank: int, functions: Functions, shards: int, room: Room = private) -> None:
        self.rank, self.shards, self.epoch = rank, shards, -1
        self.stores: dict[str, Opened] = {}
        self.slots: dict[int, Slot] = {}
        self._functions = functions
        self._servers: set[int] = set()  # connected
        self._copying, self._term = Copying(), 0
        self._begins: bool | None = None  # shards begin here: empty (False), or from a checkpoint (True)
        self._outbox = Outbox(self._acknowledged)
        self._did: dict[tuple[str, int, int], dict[int, int]] = {}  # (store, worker, sequence) -> shard -> version
        self._gone: dict[int, int] = {}  # by rank: the last sequence that counts
        self._answers, self._cuts = Answers(self._outbox, self.slots, room), Cuts(self.slots, shards)
        self.readers = Readers(self._outbox, self.slots, shards)

    # ---- the coordinator's word ------------------------------------------------------------------------------------

    def assigned(
        self, epoch: int, chains: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], alive: Iterable[int]
    ) -> list[Output]:
        """Take over which server has which shard (server.py)."""
        if epoch <= self.epoch:
            return []
        for shard, some in enumerate(zip(chains, copies, strict=True)):
            if self.rank in (*some[0], *some[1]):
                self._slot(shard)  # before the epoch moves on: one that is made was out of it until now
        self.epoch, living = epoch, frozenset(alive)
        outputs: list[Output] = []
        for shard, slot in sorted(self.slots.items()):
            assigned = partial(slot.chain.assigned, epoch, chains[shard], copies[shard], living.__contains__)
            outputs += self._chain(slot, assigned)
        return outputs + self.told()

    def begin(self, *, restored: bool) -> list[Output]:
        """Shards begin here: empty, or (`restored`) with what `loaded` brings."""
        self._begins = restored
        return [output for slot in list(self.slots.values()) for output in self._start(slot)] + self.told()

    def loaded(self, shard: int, tensors: Mapping[str, torch.Tensor]) -> list[Output]:
        """Take over what a checkpoint had of a shard (saved_tables.py)."""
        slot = self.slots.get(shard)
        if slot is None or slot.machine.version is not None:
            return []
        slot.machine.begin(load(tensors, shard, self.shards, slot.machine))
        return [*self._chain(slot, slot.chain.begun), *self.told()]

    def leave(self, lost: Mapping[int, int]) -> list[Output]:
        """These workers are gone for good: nobody waits for them any more.

        Args:
            lost: by rank, the last sequence that counts; what came later is dropped where it is not applied.
        """
        self._gone.update(lost)
        outputs: list[Output] = []
        for slot in [slot for slot in self.slots.values() if slot.leads]:
            self._let_go(slot)
            outputs += self._go(slot)
        return outputs + self.told()

    def save(self, step: int) -> list[Output]:
        """Give this server's part of the checkpoint of `step`, when all have marked it."""
        self._cuts.wanted = step
        return self.told()

    def _let_go(self, slot: Slot) -> None:
        for name in slot.machine.stores:
            slot.work.extend(Work(Head(name), Entry(rank, FOREVER, at, [], "gone")) for rank, at in self._gone.items())

    # ---- servers ---------------------------------------------------------------------------------------------------

    def server_joined(self, server: int) -> list[Output]:
        """Take in that a connection to a server is made."""
        self._servers.add(server)
        outputs = [output for slot in list(self.slots.values())
                   for output in self._chain(slot, partial(slot.chain.joined, server))]  # fmt: skip
        return outputs + self.told()

    def server_lost(self, server: int) -> list[Output]:
        """Take in that it is gone."""
        self._servers.discard(server)
        for slot in self.slots.values():
            slot.chain.lost(server)
        return [output for slot in list(self.slots.values()) for output in self._go(slot)] + self.told()

    def place_from(self, server: int, message: TableBetween, size: int) -> memoryview | None:
        """Return where another server's payload goes; None when it is not wanted.

        Raises:
            ProtocolError: it does not fit; end the connection.
        """
        return self._slot(message.shard).chain.place(server, message, size)

    def received_from(self, server: int, message: TableBetween, size: int) -> list[Output]:
        """Take in what another server said; a payload, if any, stands where `place_from` said."""
        slot = self._slot(message.shard)
        return self._chain(slot, partial(slot.chain.received, server, message, size)) + self.told()

    def _slot(self, shard: int) -> Slot:
        if not 0 <= shard < self.shards:
            raise ProtocolError(f"shard {shard} of stores with {self.shards}")
        if shard not in self.slots:
            up = self._servers.__contains__
            self.slots[shard] = Slot(shard, self.rank, self._functions, up, self.epoch, self._copying)
        return self.slots[shard]

    def _chain(self, slot: Slot, ask: Callable[[], Sequence[Any]]) -> list[Output]:
        """Do something with a shard's chain, and what follows when it comes to be led here, or no longer is."""
        before = slot.chain.role
        outputs: list[Output] = [*ask(), *self._start(slot)]
        if slot.leads and not slot.led:
            self._leads(slot)
        elif slot.led and not slot.leads:
            self._leads_no_more(slot)
        outputs += self._go(slot)
        if slot.chain.role == "none" != before and self.slots.get(slot.shard) is slot:
            del self.slots[slot.shard]
        return outputs

    def _start(self, slot: Slot) -> list[Output]:
        """Begin a shard that nobody has begun, if that is this server's part."""
        if self._begins is None or not slot.chain.leads or slot.machine.version is not None:
            return []
        if self._begins:
            return [Load(slot.shard)]
        slot.machine.begin([])
        return self._chain(slot, slot.chain.begun)

    def _leads(self, slot: Slot) -> None:
        slot.led, self._term = True, self._term + 1
        slot.term = self._term
        for name, opened in self.stores.items():
            why = slot.machine.failed.get(name)
            if why and opened.refused is None:
                self._refuse(opened, f"a function of store {name!r} failed on server/{self.rank} alone: {why}", "")
            for worker, session in sorted(opened.sessions.items()):
                self._take_part(slot, opened, worker, session)
                self._say_leads(opened, worker, session, [slot])
        self._let_go(slot)

    def _leads_no_more(self, slot: Slot) -> None:
        slot.led = False
        slot.work.clear()
        for opened in self.stores.values():
            for session in opened.sessions.values():
                session.forget(slot.shard)
        self._cuts.forget(slot.shard)
        self._answers.forget(slot.shard)
        self._outbox.take_back(slot.shard)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def received(self, worker: int, message: Any, payload: memoryview) -> list[Output]:
        """Take in a whole message of a worker; return what is to be sent.

        Raises:
            ProtocolError: the message is against the protocol; end the connection, nothing was changed.
        """
        if isinstance(message, Open):
            return self._open(worker, message) + self.told()
        opened = self.stores.get(message.store)
        session = opened.sessions.get(worker) if opened is not None else None
        if opened is None or session is None:
            raise ProtocolError(f"worker/{worker} speaks of store {message.store!r}, which it has not opened")
        if opened.refused is not None:
            return [Send(worker, opened.refused)]
        if isinstance(message, Why):
            return [Send(worker, Because(message.store, message.clock, self._behind(message)))]
        if message.session <= session.broken:
            return []
        try:
            outputs = self._taken_in(opened, session, worker, message, Reader(opened.lasting(message, payload)))
        except Unknown:
            session.broken = message.session
            return [Send(worker, KeysUnknown(message.store, message.session))]
        except UsageError as error:
            outputs = self._refuse(opened, error.message, error.hint)
        return outputs + self.told()

    def lost(self, worker: int) -> None:
        """Take in that a worker's connection is gone; what it pushed stays."""
        for opened in self.stores.values():
            opened.sessions.pop(worker, None)
            opened.waiting = [waiting for waiting in opened.waiting if waiting.worker != worker]
        self._outbox.forget(worker)

    def _open(self, worker: int, message: Open) -> list[Output]:
        name = message.store.name
        opened = open_store(message.store, self.stores, self.shards)
        if opened.spec != message.store:
            why = f"store {name!r} is opened differently on worker/{worker}"
            return [Send(worker, Refused(name, why, "give run.store() the same on every rank"))]
        if opened.refused is not None:
            return [Send(worker, opened.refused)]
        session = opened.sessions[worker] = Session(message.session, message.step, message.after)
        opened.waiting = [waiting for waiting in opened.waiting if waiting.worker != worker]
        self._outbox.forget(worker, name)
        outputs: list[Output] = []
        led = [slot for _, slot in sorted(self.slots.items()) if slot.leads]
        for slot in led:
            slot.drop(name, worker)
            self._take_part(slot, opened, worker, session)
            outputs += self._go(slot)
        self._say_leads(opened, worker, session, led)
        return outputs

    def _take_part(self, slot: Slot, opened: Opened, worker: int, session: Session) -> None:
        entry = Entry(worker, session.after, session.step, [], "open")
        slot.work.append(Work(Head(opened.spec.name, opened.spec), entry))

    def _say_leads(self, opened: Opened, worker: int, session: Session, slots: Sequence[Slot]) -> None:
        name = opened.spec.name
        told = Leads(name, session.number, self.epoch, self._term, [slot.at(name, worker) for slot in slots])
        self._outbox.put(Send(worker, told), {slot.shard: slot.version for slot in slots})

    def _refuse(self, opened: Opened, reason: str, hint: str) -> list[Output]:
        opened.refused = Refused(opened.spec.name, reason, hint)
        return [Send(worker, opened.refused) for worker in sorted(opened.sessions)]

    def _taken_in(self, opened: Opened, session: Session, worker: int, message: Any, reader: Reader) -> list[Output]:
        match message:
            case Update():
                return self._update(session, worker, message, reader)
            case Advance():
                entry = Entry(worker, message.sequence, message.clock, [], "clock")
                return self._put(message.store, self._led(message), entry)
            case Mark():
                entry = Entry(worker, message.sequence, message.step, [], "mark")
                return self._put(message.store, self._led(message), entry)
            case Fetch():
                sections = [
                    (asked, NO_KEYS if asked.count < 0 else session.lists.keys(reader, asked.count, asked.digest))
                    for asked in message.sections
                ]
                wanted = [(asked, keys) for asked, keys in sections if self._is_led(asked.shard, message.term)]
                self._answers.asked(opened, Waiting(worker, message, wanted))
            case Describe():
                slots = self._led(message)
                held = (slot.machine.stores[message.store].tables.get(message.table)
                        for slot in slots if message.store in slot.machine.stores)  # fmt: skip
                spec = next((table.kind.spec for table in held if table is not None), None)
                told = Described(message.store, message.ticket, [slot.shard for slot in slots], spec)
                self._outbox.put(Send(worker, told), {slot.shard: slot.version for slot in slots})
            case _:
                raise ProtocolError(f"worker/{worker} sent a {type(message).__name__}, which is a server's message")
        return []

    def _is_led(self, shard: int, term: int) -> bool:
        """Whether what a worker sends of a shard counts: it is led here, and the worker knew."""
        slot = self.slots.get(shard)
        return slot is not None and slot.leads and term >= slot.term

    def _led(self, message: Advance | Mark | Describe) -> list[Slot]:
        return [self.slots[shard] for shard in message.shards if self._is_led(shard, message.term)]

    # ---- entries ---------------------------------------------------------------------------------------------------

    def _update(self, session: Session, worker: int, message: Update, reader: Reader) -> list[Output]:
        """Split an update by shard; nothing is applied before all of it is understood."""
        parts: dict[int, list[Part]] = {}
        for section in message.sections:
            parts.setdefault(section.shard, []).append(session.part(section, reader, self._functions))
        outputs: list[Output] = []
        head = Head(message.store)
        for shard, each in parts.items():
            if self._is_led(shard, message.term):
                slot = self.slots[shard]
                slot.work.append(Work(head, Entry(worker, message.sequence, message.clock, each)))
                outputs += self._go(slot)
        return outputs

    def _put(self, store: str, slots: Sequence[Slot], entry: Entry) -> list[Output]:
        outputs: list[Output] = []
        for slot in slots:
            slot.work.append(Work(Head(store), entry))
            outputs += self._go(slot)
        return outputs

    def _go(self, slot: Slot) -> list[Output]:
        """Apply what can be applied now."""
        outputs: list[Output] = []
        if not slot.leads:
            return outputs
        for work in slot.due():
            opened = self.stores[work.head.store]
            if opened.refused is None:
                outputs += self._apply(slot, opened, work)
        return outputs

    def _apply(self, slot: Slot, opened: Opened, work: Work) -> list[Output]:
        store = slot.machine.stores.get(opened.spec.name)
        cut = FOREVER if store is None else store.cut
        try:
            new = slot.machine.do(work.head, work.entry)
        except UsageError as error:
            return self._refuse(opened, error.message, error.hint)
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; everyone is told
            text = f"a function of store {opened.spec.name!r} failed on server/{self.rank}"
            return self._refuse(opened, f"{text}: {type(error).__name__}: {error}", "the function's fault")
        if work.entry.what != "open":
            did = (opened.spec.name, work.entry.worker, work.entry.sequence)
            self._did.setdefault(did, {})[slot.shard] = slot.version
        if not new:
            return []
        if store is not None and cut < store.cut < FOREVER:
            self._cuts.note(store, slot.shard)
        return [*slot.down(work)]

    # ---- what is told ----------------------------------------------------------------------------------------------

    def _acknowledged(self, shard: int) -> int:
        slot = self.slots.get(shard)
        return slot.chain.acknowledged if slot is not None else -1

    def told(self) -> list[Output]:
        """Say what has come of an event; return what may be sent."""
        did, self._did = self._did, {}
        for (name, worker, sequence), versions in did.items():
            shards = {shard: at for shard, at in versions.items() if shard in self.slots and self.slots[shard].leads}
            if shards and worker in self.stores[name].sessions:
                own = min(self.slots[shard].own(name, worker) for shard in shards)
                self._outbox.put(Send(worker, Done(name, sequence, sorted(shards), own)), shards)
        for opened in self.stores.values():
            if opened.spec.staleness is not None:
                self._answers.tell_clocks(opened)
        filling = [output for slot in self.slots.values() if slot.followed for output in slot.chain.fill()]
        part = self._cuts.part()
        return [*filling, *self._outbox.released(), *([part] if part is not None else [])]

    def _behind(self, message: Why) -> list[int]:
        held = [slot.machine.stores.get(message.store) for slot in self.slots.values() if slot.leads]
        clocks = [(worker, clock) for store in held if store is not None for worker, clock in store.clocks.items()]
        return sorted({worker for worker, clock in clocks if clock < message.clock})
