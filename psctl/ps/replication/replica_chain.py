"""One server's part in the chain of replicas of one shard: entries, acknowledgements, copies, transfer of the lead.

Theory (van Renesse & Schneider, Chain replication, OSDI'04; after aggregation as in the parameter server, OSDI'14). The
head (*primary*) applies an entry and forwards it; each member applies it and forwards it; the tail acknowledges, and
the acknowledgement is sent back up the chain. So a member holds everything that the members after it hold, and an entry
that is acknowledged at the primary is on all of them. An entry's number is the version that it steps from. At most
`window` entries are unacknowledged; a member keeps these and the last `window` ones, to send them to a new successor.

The assignment (`on_assignment`) defines the chain, and the servers that receive a copy. Entries and acknowledgements of
an older assignment (an older *epoch*) are refused, so a primary that was replaced unawares can have nothing
acknowledged. On a new assignment every server sends its successor the entries that may be missing there, and reports
its version to its predecessor.

    role       in the assignment            what it does
    none       -                            nothing
    copying    receives a copy              receives a copy from the primary, then entries; does not count, but the
                                            primary is never more than CATCH_UP entries ahead of it; from the first time
                                            that it is complete (ReplicaCaughtUp) it counts; it may join at either end
    member     in the chain, not first      forwards and acknowledges
    promoting  first; the former primary    waits for the staged state of the former primary (LeadTransfer); then
               is alive                     becomes primary
    primary    first                        receives pushes, makes entries
    demoting   was first; is alive          makes no more entries; the new primary follows it, and the rest of the chain
                                            follows the new primary; when all are complete it sends LeadTransfer;
                                            then as assigned

A chain without any version has nothing to copy: the server that receives the first version passes it on to a successor
that has none.

The new primary may be lost before it leads. Then the next server of the chain leads at once, possibly without the last
entries of the server in role `demoting`. The state of that server is *void* from then on: it reports that it has no
version, and receives a copy. But it holds everything that was ever acknowledged, and while it reports no version
nothing else is acknowledged; so if it must lead before the copy arrives, it leads with the state that it has.

A follower is sent again what was lost on its connection: entries that are kept, else a copy. Its acknowledgements count
only after it has acknowledged under the newest assignment and, if a copy was sent, after it has that same copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psctl.errors import ProtocolError
from psctl.ps.messages import (
    BetweenServers,
    Forward,
    Forwarded,
    LeadAccepted,
    LeadTransfer,
    ReplicaQuery,
    StateCopy,
)
from psctl.ps.outputs import ChainOutput, LeadMoved, ReplicaCaughtUp, ToServer
from psctl.ps.replication.chain_entries import CopyBudget, EntryLog, IncomingPayloads
from psctl.ps.replication.replica_roles import (
    AFTER_HANDING,
    ROLES,
    ChainFollower,
    ReplicaPosition,
    ReplicatedState,
    Role,
    StagedState,
    position_of,
)

CATCH_UP = 4
"""Entries that a primary may be ahead of a member that receives a copy."""


class ReplicaChain:
    """Replicates one shard along its chain; the module's docstring describes the protocol. Calls must not overlap.

    Args:
        shard: its index.
        me: this server's rank.
        machine: the replicated state.
        up: returns whether there is a connection to a server.
        epoch: the newest assignment so far, in which this server had no role for the shard.
        window: entries that may be unacknowledged.
        copying: the limit on concurrent copies, shared by the server's shards.
        staged: the state that moves with the lead alone; None: there is none.
    """

    def __init__(
        self,
        shard: int,
        me: int,
        machine: ReplicatedState,
        up: Callable[[int], bool],
        epoch: int = -1,
        window: int = 1,
        copying: CopyBudget | None = None,
        staged: StagedState | None = None,
    ) -> None:
        self.shard, self.me = shard, me
        self._position = ReplicaPosition(me, epoch)
        self.role: Role = self._position.role
        """The role of this server for the shard."""
        self.leads = False
        """Whether this server answers pushes and pulls, as the primary."""
        self.alone = False
        """Whether it does without followers: then each version is settled, and an entry may always be appended."""
        self._machine, self._staged, self._up = machine, staged, up
        self._window, self._copy_budget = window, copying or CopyBudget()
        self.followers: dict[int, ChainFollower] = {}
        """The servers that receive entries from this one, with the state of each."""
        self._log = EntryLog(shard, machine)
        self._early_reports: dict[int, Forwarded] = {}  # acknowledgements under an assignment not known here yet
        self._copies_sent = 0
        self._base_version = -1  # the version here when the followers were last set
        self._former_primary: int | None = None  # the primary before this server
        self._incoming = IncomingPayloads(machine)
        self._transfer: tuple[int, int, bytes, memoryview] | None = None  # source, epoch, head, data: received early
        self._transfer_sent = False  # demoting: LeadTransfer was sent
        self._transferred = False  # demoting: the complete state was sent to this new primary
        self._transfer_epoch = -1  # the assignment that made the new primary the first of the chain
        self._pending_query: tuple[int, int] | None = None  # server and epoch, under an assignment not known here yet
        self._last_copy = ""  # the last copy that was restored

    # ---- state for the shard ---------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The newest assignment that is known here."""
        return self._position.epoch

    @property
    def members(self) -> list[int]:
        """The servers of the chain, primary first."""
        return self._position.chain

    @property
    def version(self) -> int:
        """The version that is here and not void; -1: there is none."""
        version = self._machine.version
        return -1 if version is None or self._position.void else version

    @property
    def acknowledged(self) -> int:
        """The version that all followers that count have; -1: there is none."""
        least = self.version
        for one in self.followers.values():
            if one.counts and one.acked < least:
                least = one.acked
        return least

    @property
    def settled(self) -> bool:
        """Whether all followers that count have the version that is here."""
        if not self.followers:
            return self._machine.version is not None and not self._position.void
        version = self.version
        return version >= 0 and self.acknowledged == version

    @property
    def keeps_payloads(self) -> bool:
        """Whether an entry's payload is needed after it was applied."""
        return bool(self.followers) or self._position.role != "primary"

    @property
    def may_append(self) -> bool:
        """Whether the primary may make another entry."""
        if not self.followers:
            return self._position.role == "primary" and self._machine.version is not None
        version, epoch = self.version, self._position.epoch
        if self._position.role != "primary" or version < 0 or version - self.acknowledged >= self._window:
            return False
        for one in self.followers.values():
            if one.counts and (one.reported_epoch < epoch or one.acked < self._base_version):
                return False  # it, or a server after it, may have entries that only a lost primary sent
            if one.filled and version - one.acked >= CATCH_UP:
                return False
        return True

    # ---- the assignment ---------------------------------------------------------------------------------------------

    def on_assignment(
        self, epoch: int, chain: Sequence[int], copies: Sequence[int], alive: Callable[[int], bool]
    ) -> list[ChainOutput]:
        """Apply an assignment: the shard's chain from `epoch` on.

        Args:
            epoch: number of the assignment; one that is not newer is ignored.
            chain: ranks of its servers, primary first.
            copies: ranks of the servers that are to receive a copy.
            alive: returns whether a server is alive.
        """
        now = self._position
        if epoch <= now.epoch or not chain:
            return []
        if now.role != "promoting":
            self._former_primary = now.chain[0] if now.chain else None
        if now.chain[:1] != [chain[0]]:
            self._transfer_epoch, self._transferred = epoch, False
        now.epoch, now.chain, now.copies = epoch, list(chain), list(copies)
        witness = chain[0] if now.role in ("demoting", "primary") else self._former_primary
        lives = witness is not None and witness != self.me and alive(witness)
        self._set_role(ROLES[now.role, position_of(self.me, chain, copies)][0 if lives else 1])
        self._transfer_sent = False
        self._incoming.drop_entries(epoch)
        outputs = self._accept_lead()
        known = set(self.followers)
        self._update_followers()
        self._prune()
        outputs += self._send_missing_to_all(known)
        asked = self._pending_query is not None and self._pending_query[1] <= epoch
        if self._pending_query is not None and asked:
            if self.leads and self._pending_query[0] != self.me:
                outputs.append(ToServer(self._pending_query[0], LeadAccepted(self.shard, epoch)))
            self._pending_query = None
        for server, message in self._due_reports():
            outputs += self._on_acknowledged(server, message)
        return outputs + self._acknowledge(missed=asked) + self._transfer_lead()

    def _set_role(self, role: Role) -> None:
        self._position.role = self.role = role
        self.leads, self.alone = role == "primary", False  # `_update_followers` follows
        if role == "primary":
            self._position.void = False  # no server is left that has more
        if role == "none":
            self._log.clear()
            self._incoming.drop_entries(self.epoch)
            self._incoming.drop_copies(self.epoch)
            if self._transfer is not None and self._transfer[1] < self.epoch:
                self._transfer = None

    # ---- followers ---------------------------------------------------------------------------------------------------

    def _update_followers(self) -> None:
        """Set the followers from the newest assignment; the known state of a server that was one before is kept."""
        position, before = self._position, self.followers
        self.followers, self._base_version = {}, self.version
        index = position.chain.index(self.me) if self.me in position.chain else len(position.chain)
        members = position.chain[index + 1 : index + 2]
        if position.role == "demoting":
            members = [position.chain[0], *members]
        for server in members:
            # The follower must report its version, and that of its successors, before anything counts as acknowledged.
            known = before.get(server, ChainFollower(True, filled=True))
            known.counts, known.acked = True, known.acked if known.reported_epoch >= position.epoch else -1
            # If no version is here yet, a version of the follower can only be from a primary that was lost before all
            # servers received it; the same version number will have other content here. So it receives a copy.
            known.filled = known.filled and self._base_version >= 0
            self.followers[server] = known
        for server in position.copies if position.role == "primary" else ():
            self.followers[server] = before.get(server, ChainFollower(False))
        self.alone = self.leads and not self.followers
        for server in before.keys() - self.followers.keys():
            self._copy_budget.finish(self.shard, server)

    # ---- what followers are sent -------------------------------------------------------------------------------------

    def append(self, number: int, head: bytes, payload: memoryview) -> list[ChainOutput]:
        """Forward an entry that was applied here; `payload` is kept until no follower can need it."""
        self._log.add(number, head, payload)
        outputs: list[ChainOutput] = []
        for server, follower in self.followers.items():
            if follower.filled and self._up(server):
                outputs.append(self._log.message(server, number, self._position.epoch))
        self._prune()
        return outputs

    def start_waiting_copies(self) -> list[ChainOutput]:
        """Start copies that waited for the copy budget."""
        waiting = [server for server, follower in self.followers.items() if not follower.filled]
        return [output for server in waiting for output in self._send_missing(server, again=True)]

    def on_first_version(self) -> list[ChainOutput]:
        """Send the machine's first version to the followers."""
        return self._send_missing_to_all() + self._transfer_lead()

    def on_server_connected(self, server: int) -> list[ChainOutput]:
        """Send again what may have been lost with an older connection to a server."""
        return self._send_missing(server, again=True) + self._acknowledge(server) + self._transfer_lead(again=server)

    def on_server_disconnected(self, server: int) -> None:
        """Handle the loss of a connection; a copy that was in progress starts again later."""
        self._incoming.on_server_disconnected(server)
        self._copy_budget.finish(self.shard, server)
        follower = self.followers.get(server)
        if follower is not None and not follower.counts:
            self.followers[server] = ChainFollower(False)

    def _send_missing_to_all(self, known: set[int] | None = None) -> list[ChainOutput]:
        """Send each follower what it may lack; what was sent to others than `known` (None: to all) may be lost."""
        outputs: list[ChainOutput] = []
        for server in list(self.followers):
            outputs += self._send_missing(server, again=known is None or server not in known)
        return outputs

    def _send_missing(self, server: int, *, again: bool) -> list[ChainOutput]:
        """Send a follower what it may lack: a copy, or the entries that it has not acknowledged.

        Args:
            server: its rank.
            again: what was sent before may be lost, so a copy that was not acknowledged is started again.
        """
        follower, position = self.followers.get(server), self._position
        if follower is None or self.version < 0 or not self._up(server):
            return []
        paced = not follower.filled and position.role == "primary"
        if paced and not self._copy_budget.start(self.shard, server, self._machine.copy_limit):
            return []  # `start_waiting_copies` starts it later
        if not follower.filled or (again and follower.copy) or self._needs_copy(follower):
            return self._copy(server, follower)
        outputs: list[ChainOutput] = []
        if follower.reported_epoch < position.epoch:
            outputs.append(ToServer(server, ReplicaQuery(self.shard, position.epoch)))
        if follower.reported_epoch >= 0 or follower.copied >= 0:
            for number in self._log.since(max(follower.has, follower.copied)):
                outputs.append(self._log.message(server, number, position.epoch))
        if follower.counts and position.role == "primary" and server in position.copies:
            outputs.append(ReplicaCaughtUp(position.epoch, self.shard, server))
        return outputs

    def _copy_to_strayed(self) -> list[ChainOutput]:
        """Send a copy of a version that was restored here to the followers that cannot reach it by entries."""
        outputs: list[ChainOutput] = []
        for server, follower in self.followers.items():
            if (self._needs_copy(follower) or not follower.filled) and self._up(server):
                outputs += self._copy(server, follower)
        return outputs

    def _copy(self, server: int, follower: ChainFollower) -> list[ChainOutput]:
        head, data = self._machine.snapshot()
        version, epoch = self.version, self._position.epoch
        self._copies_sent += 1
        follower.filled, follower.copied = True, version
        follower.copy = f"{self.me}.{epoch}.{self._copies_sent}"
        follower.acked = min(follower.acked, version) if follower.counts else version - 1
        return [ToServer(server, StateCopy(self.shard, version, epoch, head, follower.copy), data or None)]

    def _needs_copy(self, follower: ChainFollower) -> bool:
        """Return whether a follower lacks entries that are not kept, or has entries that only a lost primary sent."""
        version = self.version
        if version < 0 or follower.copy or follower.reported_epoch < 0:
            return False
        ahead = follower.has > version and self._position.role in ("primary", "member", "demoting")
        return ahead or follower.has < self._log.lowest(version)

    def _prune(self) -> None:
        """Release the entries that no follower can need."""
        version = self.version
        needed = min([version, *(one.acked for one in self.followers.values() if one.filled)])
        if self._position.role != "primary":
            needed = min(needed, version - self._window)
        self._log.drop_below(needed)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def receive_buffer_for(self, server: int, message: BetweenServers, size: int) -> memoryview | None:
        """Return the buffer for a payload; None when the payload is not needed.

        Raises:
            ProtocolError: the payload does not fit; nothing was changed.
        """
        match message:
            case Forward():
                limit, expected = self._machine.entry_limit, self._is_next(message)
            case StateCopy():
                limit, expected = self._machine.copy_limit, self._is_expected(server, message.epoch)
            case LeadTransfer():
                limit = self._staged.staged_limit if self._staged is not None else 0
                expected = self._is_expected(server, message.epoch)
            case _:
                what = f"{type(message).__name__} with a payload"
                raise ProtocolError(f"server/{server}: {what}", where=f"server/{server}")
        if size > limit:
            what = f"{'an entry' if isinstance(message, Forward) else 'a copy'} of {size} bytes, more than {limit}"
            raise ProtocolError(f"server/{server}, shard {self.shard}: {what}", where=f"server/{server}")
        return self._incoming.expect(server, message, size) if expected else None

    def on_message(self, server: int, message: BetweenServers, size: int) -> list[ChainOutput]:
        """Handle another server's message whose payload, if any, was received into `receive_buffer_for`'s buffer.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        if self.leads and isinstance(message, Forward | ReplicaQuery) and message.epoch >= self.epoch:
            return [ToServer(server, LeadAccepted(self.shard, message.epoch))]  # the sender need not transfer the lead
        match message:
            case Forward():
                return self._on_entry(server, message, size)
            case ReplicaQuery():
                if message.epoch <= self.epoch:  # an earlier copy that is not the one restored here is lost
                    return self._acknowledge(missed=True)
                self._pending_query = (server, message.epoch)
                return []
            case Forwarded():
                return self._on_acknowledged(server, message)
            case StateCopy() | LeadTransfer():
                return self._on_copy(server, message, size)
            case LeadAccepted():
                return self._on_lead_accepted(message)
            case _:
                raise ProtocolError(f"server/{server}: {type(message).__name__} is not about a chain")

    def _is_expected(self, server: int, epoch: int) -> bool:
        """Return whether a copy is accepted: of a newer assignment, or from this server's predecessor."""
        if epoch > self.epoch or (server == self._predecessor and self.role != "none"):
            return True
        return epoch == self.epoch and self.role in ("copying", "member", "promoting", "primary")

    def _is_next(self, message: Forward) -> bool:
        """Return whether an entry is the next one here, and of no older epoch."""
        if message.epoch < self.epoch or (message.epoch == self.epoch and self.role in ("none", "primary")):
            return False
        # In role demoting the state here is the newest, or void.
        return self.role != "demoting" and message.number == self.version

    def _on_entry(self, server: int, message: Forward, size: int) -> list[ChainOutput]:
        if size == 0:
            self.receive_buffer_for(server, message, 0)
        payload = self._incoming.finish(server)
        if payload is None:
            missed = message.number > self.version
            return self._acknowledge(missed=missed) if message.epoch >= self.epoch else []
        self._machine.apply(message.head, payload, kept=True)
        return self.append(message.number, message.head, payload) + self._acknowledge()

    @property
    def _predecessor(self) -> int | None:
        """The server that this one follows."""
        return self._former_primary if self.role == "promoting" else self._position.before

    def _acknowledge(self, only: int | None = None, *, missed: bool = False) -> list[ChainOutput]:
        """Acknowledge to the predecessor (if it is `only`)."""
        source = self._predecessor
        if source is None or source == self.me or only not in (None, source):
            return []
        has = self.version
        new_primary = self._position.chain[0] if self.role == "demoting" else None  # it precedes this server, too
        if new_primary is not None and (has < 0 or self.followers[new_primary].has < has):
            return []  # the acknowledgement would be ahead of this server's predecessors
        after = [one.acked for server, one in self.followers.items() if one.counts and server != new_primary]
        return [ToServer(source, Forwarded(self.shard, min([has, *after]), has, self.epoch, self._last_copy, missed))]

    def _on_acknowledged(self, server: int, message: Forwarded) -> list[ChainOutput]:
        outputs, changed = self._update_follower(server, message)
        return outputs + (self._acknowledge() if changed else []) + self._transfer_lead()

    def _update_follower(self, server: int, message: Forwarded) -> tuple[list[ChainOutput], bool]:
        """Record a follower's report; return what it must be sent, and whether its recorded state changed."""
        follower, epoch = self.followers.get(server), self._position.epoch
        if message.epoch > epoch:
            self._early_reports[server] = message  # it concerns a chain that is not known here yet
            return [], False
        if follower is None or message.epoch < epoch or not follower.filled:
            return [], False
        if follower.copy and follower.copy != message.copy:
            return self._send_missing(server, again=True) if message.missed else [], False
        follower.copy = ""
        self._copy_budget.finish(self.shard, server)
        before, lacks = (follower.acked, follower.has), message.missed or follower.reported_epoch < message.epoch
        follower.acked, follower.has = max(follower.acked, message.version), message.has
        follower.reported_epoch = max(follower.reported_epoch, message.epoch)
        if self._needs_copy(follower):
            return self._copy(server, follower), False
        outputs: list[ChainOutput] = self._send_missing(server, again=False) if lacks else []
        if not follower.counts and follower.acked == self.version:
            follower.counts = True
            outputs.append(ReplicaCaughtUp(epoch, self.shard, server))
        self._prune()
        return outputs, (follower.acked, follower.has) != before

    def _due_reports(self) -> list[tuple[int, Forwarded]]:
        """Remove and return the early reports of assignments that have arrived by now."""
        due = [(server, later) for server, later in self._early_reports.items() if later.epoch <= self._position.epoch]
        for server, _ in due:
            del self._early_reports[server]
        return due

    def _on_copy(self, server: int, message: StateCopy | LeadTransfer, size: int) -> list[ChainOutput]:
        if size == 0:
            self.receive_buffer_for(server, message, 0)
        data = self._incoming.finish(server)
        if data is None or not self._is_expected(server, message.epoch):
            return self._acknowledge(missed=True)
        if isinstance(message, LeadTransfer):
            self._transfer = (server, message.epoch, message.head, data)
            return self._accept_lead()
        if self.role == "primary" and message.epoch <= self.epoch:
            return []
        self._last_copy = message.copy
        if self.role == "primary":
            return []  # in role demoting under that assignment
        if self.role == "demoting":  # the state here is the newest, or void
            return self._acknowledge()
        first, self._position.void = self.version < 0, False
        self._machine.restore(message.version, message.head, data)
        self._incoming.drop_entries()
        self._log.clear()
        outputs = self.on_first_version() if first else []
        return outputs + self._copy_to_strayed() + self._acknowledge()

    # ---- transfer of the lead -------------------------------------------------------------------------------------

    def _transfer_lead(self, again: int | None = None) -> list[ChainOutput]:
        """Send LeadTransfer when the new primary, and all followers that count, are complete."""
        if self.role != "demoting":
            return []
        first = self._position.chain[0]
        new_primary = self.followers.get(first)
        if new_primary is None or new_primary.reported_epoch < self.epoch or not self.settled or not self._up(first):
            return []
        if self._transfer_sent and again != first:
            return []
        self._transfer_sent = self._transferred = True
        head, data = (b"", None) if self._staged is None else self._staged.staged_state()
        version = self._machine.version
        assert version is not None, "it is settled"
        return [ToServer(first, LeadTransfer(self.shard, version, self.epoch, head), data or None)]

    def _accept_lead(self) -> list[ChainOutput]:
        if self._transfer is None or self._transfer[1] > self.epoch:
            return []
        (source, epoch, head, data), self._transfer = self._transfer, None
        if epoch < self.epoch or self.role not in ("promoting", "primary"):
            return []
        outputs: list[ChainOutput] = [ToServer(source, LeadAccepted(self.shard, epoch))]
        if self.role == "primary":
            return outputs  # a repetition after a broken connection
        if self._staged is not None:
            self._staged.restore_staged(head, data)
        self._set_role("primary")
        self._former_primary = self.me
        known = set(self.followers)
        self._update_followers()
        for server in set(self.followers) - known:
            outputs += self._send_missing(server, again=True)
        return outputs

    def _on_lead_accepted(self, message: LeadAccepted) -> list[ChainOutput]:
        now = self._position
        if now.role != "demoting" or message.epoch < self._transfer_epoch:
            return []
        if not (self.settled or self._transferred):  # the new primary began without entries that are only here
            now.void = True
            self._log.clear()
        self._set_role(AFTER_HANDING[position_of(self.me, now.chain, now.copies)])
        self._update_followers()
        return [LeadMoved(self.epoch, self.shard), *self._acknowledge(missed=True)]
