"""The state machine of a server's tables: it receives messages and returns messages; it never waits or does I/O.

For each shard that the server leads or replicates, it stores that shard of every store (table_shard.py); for each
worker it stores a session: the key lists and tables sent, the rows read (client_sessions.py). An update is split by
shard. The primary of each shard applies its part and sends it down the chain of replicas (replication/); the part is
Done when all servers of the chain have it. An answer that depends on it is sent only then (read_answers.py). So the
loss of a server loses no update that a worker has observed; the worker sends updates that are not Done again, to the
next primary of the chain.

A read that requests clock r is answered once all workers of the group have finished r clocks: the server's half of
SSP's cache rule (Ho and others 2013: a row with clock r may be read at clock c iff r >= c - s).

Exactly once: the sequences of a worker's updates increase. A shard applies an update only if its sequence is larger
than the last one applied of that worker; else it only acknowledges it again. This requires that a shard receives the
updates of a worker without a gap: a worker sends nothing about a shard until StoreLeads has announced its primary, then
it sends all updates that are not Done. `term` identifies earlier messages, which are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from psctl.errors import ProtocolError, UsageError
from psctl.ps.messages import Refused, WaitAnswer, WaitQuery
from psctl.ps.outputs import ChainOutput, LeadMoved, LoadTables, ReplicaCaughtUp, SaveSlices, ToServer, ToWorker
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.table_messages import (
    DescribeTable,
    Done,
    Fetch,
    KeysUnknown,
    Marker,
    OpenStore,
    StoreLeads,
    TableBetween,
    TableDescribed,
    TableFromWorker,
    TableStats,
    Update,
)
from psctl.ps.tables.server.client_sessions import ClientSession, OpenedStore, UnknownToSession, WaitingRead, open_store
from psctl.ps.tables.server.read_answers import HeldAnswers, ReadAnswers
from psctl.ps.tables.server.saved_tables import load
from psctl.ps.tables.server.table_checkpoints import TableCheckpoints
from psctl.ps.tables.server.table_shard import EntryHead, HostedShard, WaitingEntry, led_shards
from psctl.ps.tables.table_kinds import Functions
from psctl.ps.tables.table_packing import Allocate, PayloadReader, allocate_private
from psctl.ps.tables.table_state import FOREVER, EntryPart, TableEntry

TableOutput = ToWorker | ToServer | ReplicaCaughtUp | LeadMoved | SaveSlices | LoadTables


class TableServer:
    """All tables of one server. Its calls must not overlap.

    Args:
        rank: this server's.
        functions: reductions and users' functions.
        shards: how many each store has.
        allocate: returns memory for answers.
        full_every: a part of a checkpoint has all rows at least once in so many; others have those that changed.
    """

    def __init__(
        self, rank: int, functions: Functions, shards: int, allocate: Allocate = allocate_private, full_every: int = 1
    ) -> None:  # fmt: skip
        self.rank, self.shard_count, self.epoch = rank, shards, -1
        self.stores: dict[str, OpenedStore] = {}
        self.shards_here: dict[int, HostedShard] = {}
        self._functions = functions
        self._servers: set[int] = set()  # connected
        self._copy_budget, self._term = CopyBudget(), 0
        self._begins: bool | None = None  # shards begin here: empty (False), or from a checkpoint (True)
        self.held_answers = HeldAnswers(self._acknowledged)
        self._applied: dict[tuple[str, int, int], dict[int, int]] = {}  # (store, worker, sequence) -> shard -> version
        self._lost_workers: dict[int, int] = {}  # by rank: the last sequence that counts
        self._answers = ReadAnswers(self.held_answers, self.shards_here, allocate)
        self._checkpoints = TableCheckpoints(self.shards_here, shards, full_every)

    # ---- decisions of the coordinator --------------------------------------------------------------------------------

    def on_assignment(
        self, epoch: int, chains: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], alive: Iterable[int]
    ) -> list[TableOutput]:
        """Apply a new assignment of shards to servers."""
        if epoch <= self.epoch:
            return []
        for shard, some in enumerate(zip(chains, copies, strict=True)):
            if self.rank in (*some[0], *some[1]):
                self._shard(shard)  # before the epoch changes: a new shard had no part in the former epoch
        self.epoch, servers = epoch, frozenset(alive)
        outputs: list[TableOutput] = []
        for shard, hosted in sorted(self.shards_here.items()):
            changed = hosted.chain.on_assignment(epoch, chains[shard], copies[shard], servers.__contains__)
            outputs += self._after_chain(hosted, changed)
        return outputs + self.release_outputs()

    def start_shards(self, *, restored: bool) -> list[TableOutput]:
        """Start the shards that this server leads: empty, or (`restored`) with the state passed to `on_loaded`."""
        self._begins = restored
        return [
            output for hosted in list(self.shards_here.values()) for output in self._start_shard(hosted)
        ] + self.release_outputs()

    def on_loaded(self, shard: int, tensors: Mapping[str, torch.Tensor]) -> list[TableOutput]:
        """Start a shard with its state in a checkpoint (saved_tables.py)."""
        hosted = self.shards_here.get(shard)
        if hosted is None or hosted.state.version is not None:
            return []
        hosted.state.set_first_version(load(tensors, shard, self.shard_count, hosted.state))
        return [*self._after_chain(hosted, hosted.chain.on_first_version()), *self.release_outputs()]

    def remove_workers(self, lost: Mapping[int, int]) -> list[TableOutput]:
        """Remove workers that are lost for good: no worker waits for them any more.

        Args:
            lost: by rank, the last valid sequence; later updates are dropped where they are not applied.
        """
        self._lost_workers.update(lost)
        outputs: list[TableOutput] = []
        for hosted in [hosted for hosted in self.shards_here.values() if hosted.leads]:
            self._add_removals(hosted)
            outputs += self._apply_due(hosted)
        return outputs + self.release_outputs()

    def request_checkpoint(self, step: int) -> list[TableOutput]:
        """Request this server's part of the checkpoint of `step`, which is sent when all workers have marked it."""
        self._checkpoints.wanted = step
        return self.release_outputs()

    def on_saved(self, step: int) -> None:
        """Note that the checkpoint of `step` is complete; -1: that later ones must not be based on an earlier one."""
        self._checkpoints.on_saved(step)

    def _add_removals(self, hosted: HostedShard) -> None:
        for name in hosted.state.stores:
            hosted.waiting.extend(
                WaitingEntry(EntryHead(name), TableEntry(rank, FOREVER, at, [], "removed"))
                for rank, at in self._lost_workers.items()
            )

    # ---- servers ---------------------------------------------------------------------------------------------------

    def on_server_connected(self, server: int) -> list[TableOutput]:
        """Note that a server is connected."""
        self._servers.add(server)
        outputs: list[TableOutput] = []
        for hosted in list(self.shards_here.values()):
            outputs += self._after_chain(hosted, hosted.chain.on_server_connected(server))
        return outputs + self.release_outputs()

    def on_server_disconnected(self, server: int) -> list[TableOutput]:
        """Note that a server is disconnected."""
        self._servers.discard(server)
        for hosted in self.shards_here.values():
            hosted.chain.on_server_disconnected(server)
        return [
            output for hosted in list(self.shards_here.values()) for output in self._apply_due(hosted)
        ] + self.release_outputs()

    def replica_buffer_for(self, server: int, message: TableBetween, size: int) -> memoryview | None:
        """Return the buffer for another server's payload; None when the payload is not wanted.

        Raises:
            ProtocolError: it does not fit; end the connection.
        """
        return self._shard(message.shard).chain.receive_buffer_for(server, message, size)

    def on_server_message(self, server: int, message: TableBetween, size: int) -> list[TableOutput]:
        """Process another server's message; its payload, if any, is in the buffer of `replica_buffer_for`."""
        hosted = self._shard(message.shard)
        outputs = self._after_chain(hosted, hosted.chain.on_message(server, message, size))
        return outputs + self.release_outputs()

    def _shard(self, shard: int) -> HostedShard:
        if not 0 <= shard < self.shard_count:
            raise ProtocolError(f"shard {shard} of stores with {self.shard_count}")
        if shard not in self.shards_here:
            up = self._servers.__contains__
            self.shards_here[shard] = HostedShard(shard, self.rank, self._functions, up, self.epoch, self._copy_budget)
        return self.shards_here[shard]

    def _after_chain(self, hosted: HostedShard, outputs: Sequence[ChainOutput]) -> list[TableOutput]:
        """Handle a change of whether the shard is led here, after an event of its chain; return all outputs."""
        found: list[TableOutput] = [*outputs, *self._start_shard(hosted)]
        if hosted.leads and not hosted.announced:
            self._on_lead(hosted)
        elif hosted.announced and not hosted.leads:
            self._on_lead_lost(hosted)
        found += self._apply_due(hosted)
        if hosted.chain.role != "none":
            hosted.had_role = True
        elif hosted.had_role and self.shards_here.get(hosted.shard) is hosted:
            del self.shards_here[hosted.shard]
        return found

    def _start_shard(self, hosted: HostedShard) -> list[TableOutput]:
        """Start a shard without a first version, if this server leads it."""
        if self._begins is None or not hosted.chain.leads or hosted.state.version is not None:
            return []
        if self._begins:
            asks, hosted.loads = not hosted.loads, True
            return [LoadTables(hosted.shard)] if asks else []
        hosted.state.set_first_version([])
        return self._after_chain(hosted, hosted.chain.on_first_version())

    def _on_lead(self, hosted: HostedShard) -> None:
        hosted.announced, self._term = True, self._term + 1
        hosted.term = self._term
        for name, opened in self.stores.items():
            why = hosted.state.failed.get(name)
            if why and opened.refused is None:
                self._refuse(opened, f"a function of store {name!r} failed on server/{self.rank} alone: {why}", "")
            for worker, session in sorted(opened.sessions.items()):
                self._add_open_entry(hosted, opened, worker, session)
                self._send_leads(opened, worker, session, [hosted])
        self._add_removals(hosted)

    def _on_lead_lost(self, hosted: HostedShard) -> None:
        hosted.announced = False
        hosted.waiting.clear()
        for opened in self.stores.values():
            for session in opened.sessions.values():
                session.forget(hosted.shard)
        self._checkpoints.forget(hosted.shard)
        self._answers.forget(hosted.shard)
        self.held_answers.withdraw(hosted.shard)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def on_worker_message(self, worker: int, message: TableFromWorker, payload: memoryview) -> list[TableOutput]:
        """Process a whole message of a worker; return the messages to send.

        Raises:
            ProtocolError: the message violates the protocol; end the connection. Nothing was changed.
        """
        if isinstance(message, OpenStore):
            return self._open(worker, message) + self.release_outputs()
        opened = self.stores.get(message.store)
        session = opened.sessions.get(worker) if opened is not None else None
        if opened is None or session is None:
            raise ProtocolError(
                f"worker/{worker} sent a message about store {message.store!r}, which it has not opened"
            )
        if opened.refused is not None:
            return [ToWorker(worker, opened.refused)]
        if isinstance(message, WaitQuery):
            return [ToWorker(worker, WaitAnswer(message.clock, self._ranks_behind(message), message.store))]
        if message.session <= session.ignored_until:
            return []
        try:
            outputs = self._dispatch(
                opened, session, worker, message, PayloadReader(opened.lasting_payload(message, payload))
            )
        except UnknownToSession:
            session.ignored_until = message.session
            return [ToWorker(worker, KeysUnknown(message.store, message.session))]
        except UsageError as error:
            outputs = self._refuse(opened, error.message, error.hint)
        return outputs + self.release_outputs()

    def on_worker_disconnected(self, worker: int) -> None:
        """Note that a worker is disconnected; its pushes stay."""
        for opened in self.stores.values():
            opened.sessions.pop(worker, None)
            opened.waiting_reads = [waiting for waiting in opened.waiting_reads if waiting.worker != worker]
        self.held_answers.forget(worker)

    def _open(self, worker: int, message: OpenStore) -> list[TableOutput]:
        name = message.store.name
        opened = open_store(message.store, self.stores, self.shard_count)
        if opened.spec != message.store:
            why = f"store {name!r} is opened differently on worker/{worker}"
            return [ToWorker(worker, Refused(why, "give run.store() the same on every rank", name))]
        if opened.refused is not None:
            return [ToWorker(worker, opened.refused)]
        session = opened.sessions[worker] = ClientSession(message.session, message.step, message.after)
        opened.waiting_reads = [waiting for waiting in opened.waiting_reads if waiting.worker != worker]
        self.held_answers.forget(worker, name)
        outputs: list[TableOutput] = []
        led = led_shards(self.shards_here)
        for hosted in led:
            hosted.drop_waiting(name, worker)
            self._add_open_entry(hosted, opened, worker, session)
            outputs += self._apply_due(hosted)
        self._send_leads(opened, worker, session, led)
        return outputs

    def _add_open_entry(self, hosted: HostedShard, opened: OpenedStore, worker: int, session: ClientSession) -> None:
        entry = TableEntry(worker, session.after, session.step, [], "open")
        hosted.waiting.append(WaitingEntry(EntryHead(opened.spec.name, opened.spec), entry))

    def _send_leads(
        self, opened: OpenedStore, worker: int, session: ClientSession, slots: Sequence[HostedShard]
    ) -> None:
        name = opened.spec.name
        answer = StoreLeads(
            name, session.number, self.epoch, self._term, [hosted.progress(name, worker) for hosted in slots]
        )
        self.held_answers.add(ToWorker(worker, answer), {hosted.shard: hosted.version for hosted in slots})

    def _refuse(self, opened: OpenedStore, reason: str, hint: str) -> list[TableOutput]:
        opened.refused = Refused(reason, hint, opened.spec.name)
        return [ToWorker(worker, opened.refused) for worker in sorted(opened.sessions)]

    def _dispatch(
        self, opened: OpenedStore, session: ClientSession, worker: int, message: TableFromWorker, reader: PayloadReader
    ) -> list[TableOutput]:
        match message:
            case Update():
                return self._update(session, worker, message, reader)
            case Marker():
                entry = TableEntry(worker, message.sequence, message.number, [], message.what)
                return self._add_entry(message.store, self._led_shards(message), entry)
            case Fetch():
                sections, bags = session.read_request(message, reader)
                wanted = [(asked, keys) for asked, keys in sections if self._is_led(asked.shard, message.term)]
                self._answers.on_read(opened, WaitingRead(worker, message, wanted, bags=bags))
            case DescribeTable():
                slots = self._led_shards(message)
                held = (hosted.state.stores[message.store].tables.get(message.table)
                        for hosted in slots if message.store in hosted.state.stores)  # fmt: skip
                spec = next((table.kind.spec for table in held if table is not None), None)
                stats = [table.stats if (table := hosted.table(message.store, message.table)) is not None
                         else TableStats() for hosted in slots]  # fmt: skip
                answer = TableDescribed(
                    message.store, message.ticket, message.table, [hosted.shard for hosted in slots], spec, stats
                )
                self.held_answers.add(ToWorker(worker, answer), {hosted.shard: hosted.version for hosted in slots})
            case _:
                raise ProtocolError(f"worker/{worker} sent a {type(message).__name__}, which is a server's message")
        return []

    def _is_led(self, shard: int, term: int) -> bool:
        """Whether a worker's message about a shard is valid: this server leads it, and announced so in this term."""
        hosted = self.shards_here.get(shard)
        return hosted is not None and hosted.leads and term >= hosted.term

    def _led_shards(self, message: Marker | DescribeTable) -> list[HostedShard]:
        return [self.shards_here[shard] for shard in message.shards if self._is_led(shard, message.term)]

    # ---- entries ---------------------------------------------------------------------------------------------------

    def _update(self, session: ClientSession, worker: int, message: Update, reader: PayloadReader) -> list[TableOutput]:
        """Split an update by shard; apply nothing before all of it is decoded."""
        parts: dict[int, list[EntryPart]] = {}
        for section in message.sections:
            parts.setdefault(section.shard, []).append(session.read_part(section, reader, self._functions))
        outputs: list[TableOutput] = []
        head = EntryHead(message.store)
        for shard, each in parts.items():
            if self._is_led(shard, message.term):
                hosted = self.shards_here[shard]
                hosted.waiting.append(WaitingEntry(head, TableEntry(worker, message.sequence, message.clock, each)))
                outputs += self._apply_due(hosted)
        return outputs

    def _add_entry(self, store: str, slots: Sequence[HostedShard], entry: TableEntry) -> list[TableOutput]:
        outputs: list[TableOutput] = []
        for hosted in slots:
            hosted.waiting.append(WaitingEntry(EntryHead(store), entry))
            outputs += self._apply_due(hosted)
        return outputs

    def _apply_due(self, hosted: HostedShard) -> list[TableOutput]:
        """Apply what can be applied now."""
        outputs: list[TableOutput] = []
        if not hosted.leads:
            return outputs
        for work in hosted.take_due():
            opened = self.stores[work.head.store]
            if opened.refused is None:
                outputs += self._apply(hosted, opened, work)
        return outputs

    def _apply(self, hosted: HostedShard, opened: OpenedStore, work: WaitingEntry) -> list[TableOutput]:
        store = hosted.state.stores.get(opened.spec.name)
        cut = FOREVER if store is None else store.cut
        try:
            new = hosted.state.apply_new(work.head, work.entry)
        except UsageError as error:
            return self._refuse(opened, error.message, error.hint)
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; all workers are refused
            text = f"a function of store {opened.spec.name!r} failed on server/{self.rank}"
            return self._refuse(opened, f"{text}: {type(error).__name__}: {error}", "the function's fault")
        if work.entry.what != "open":
            did = (opened.spec.name, work.entry.worker, work.entry.sequence)
            self._applied.setdefault(did, {})[hosted.shard] = hosted.version
        if not new:
            return []
        if store is not None and cut < store.cut < FOREVER:
            self._checkpoints.add_copy(store, hosted.shard)
        return [*hosted.forward(work)]

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _acknowledged(self, shard: int) -> int:
        hosted = self.shards_here.get(shard)
        return hosted.chain.acknowledged if hosted is not None else -1

    def release_outputs(self) -> list[TableOutput]:
        """Queue the answers that an event has caused; return the messages that may be sent now."""
        did, self._applied = self._applied, {}
        for (name, worker, sequence), versions in did.items():
            shards = {
                shard: at
                for shard, at in versions.items()
                if shard in self.shards_here and self.shards_here[shard].leads
            }
            if shards and worker in self.stores[name].sessions:
                own = min(self.shards_here[shard].own_clock(name, worker) for shard in shards)
                self.held_answers.add(ToWorker(worker, Done(name, sequence, sorted(shards), own)), shards)
        for opened in self.stores.values():
            if opened.spec.staleness is not None:
                self._answers.announce_clocks(opened)
        filling = [
            output
            for hosted in self.shards_here.values()
            if hosted.has_replicas
            for output in hosted.chain.start_waiting_copies()
        ]
        part = self._checkpoints.take_part()
        return [*filling, *self.held_answers.release(), *([part] if part is not None else [])]

    def _ranks_behind(self, message: WaitQuery) -> list[int]:
        held = [hosted.state.stores.get(message.store) for hosted in self.shards_here.values() if hosted.leads]
        clocks = [(worker, clock) for store in held if store is not None for worker, clock in store.clocks.items()]
        return sorted({worker for worker, clock in clocks if clock < message.clock})
