"""Mutants: defects in shipped modules, a method or two replaced, each of which the simulator must catch.

`python -m tests.simulation --mutants` prints each mutant, the number of seeds until it is caught, and the invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from psctl.agent.leadership import Voter
from psctl.coordinator.connections import CoordinatorConnections
from psctl.coordinator.journal import Journal, NoCopy
from psctl.coordinator.journaled_state_machine import JournaledStateMachine
from psctl.coordinator.policies.shard_placement import ShardPlacement
from psctl.coordinator.replication import UNKNOWN, Replication
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state import example_division, server_changes
from psctl.coordinator.state.instructions import MessageReceived
from psctl.job.leadership_messages import Configuration, VoteGiven, VoteWanted
from psctl.job.message_session import is_numbered
from psctl.job.session_messages import MessagesReceived
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.client.host_collection import HostCollection
from psctl.ps.dense.client.receive_buffers import ReceiveBuffers
from psctl.ps.dense.client.send_buffers import SendBuffers
from psctl.ps.dense.client.unacked_pushes import UnackedPushes
from psctl.ps.dense.client.value_relay import ValueRelay
from psctl.ps.dense.clock_ledger import BackwardLedger, Membership
from psctl.ps.dense.server.aggregation import ClockAggregation
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.server.push_staging import PushStaging, StagedTransfer
from psctl.ps.dense.server.shard_answers import VersionReaders
from psctl.ps.messages import Pull
from psctl.ps.outputs import Snapshot, ToServer
from psctl.ps.replication.replica_chain import ReplicaChain
from psctl.ps.tables import table_bytes
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.row_filters import Rounded
from psctl.ps.tables.server.client_sessions import OpenedStore
from psctl.ps.tables.server.table_server import TableServer
from psctl.ps.tables.server.table_shard import ReplicatedTables
from psctl.ps.tables.table_state import EntryPart, ShardTable, TableEntry, TableShard
from tests.simulation.catalogue import SIMULATIONS
from tests.simulation.outcome import Outcome

Patch = tuple[type | ModuleType, str, Callable[[Any], Any]]
"""A class or a module, the name of its method or function, and a function from that to its mutant."""


@dataclass(frozen=True)
class Mutant:
    """A planted defect."""

    name: str
    patches: tuple[Patch, ...]
    first_seed: int  # a seed that caught it; tests begin with it
    seed_limit: int = 600
    simulation: str = "store"


def _renumber_old_push(method: Any) -> Any:
    """Treat a push that was received before as the next one."""

    def mutant(self: DenseShard, rank: int, message: Any, *more: Any) -> Any:
        taken = self.staging.clock_of(rank)
        if self.leads and message.clock <= taken:
            message = replace(message, clock=taken + 1)
        return method(self, rank, message, *more)

    return mutant


def _tell_workers_first(method: Any) -> Any:
    """Do not wait until servers know the new members."""

    def mutant(job: Any, change: Any, clock: int) -> bool:
        method(job, change, clock)
        return True

    return mutant


def _take_last_answer(method: Any) -> Any:
    """Let new members begin at the clock of the last answer."""

    def mutant(job: Any, rank: Any, message: Any) -> None:
        if job.division.change is not None and job.division.change.joining:
            job.division.change.clock = 0
        method(job, rank, message)

    return mutant


def _forget_terms(method: Any) -> Any:
    """Treat a rank that joins again as one that never left."""
    return lambda self, rank: self.changes[0][0]


def _leave_at_once(method: Any) -> Any:
    """Have the workers that leave make no clock that they have not begun."""

    def mutant(change: Any, clock: int) -> Any:
        return method(change, clock - 1 if change.leaving else clock)

    return mutant


def _not_elastic(method: Any) -> Any:
    """Have workers remember no batches, unless lost workers are never replaced."""

    def mutant(job: Any, *args: Any) -> Any:
        return replace(method(job, *args), elastic=job.order.on_worker_loss == "continue")

    return mutant


def _share_send_buffer(method: Any) -> Any:
    """Use one send buffer for all clocks."""

    def mutant(self: SendBuffers, *args: Any, **more: Any) -> None:
        method(self, *args, **more)
        self._flat = [self._flat[0]] * len(self._flat)

    return mutant


def _find_no_change(method: Any) -> Any:
    """Send nothing after the early answer to a read of the next clock."""

    def mutant(table: ShardTable, keys: Any, change: int) -> Any:
        return method(table, keys, change)[:0]

    return mutant


def _count_a_key_once(method: Any) -> Any:
    """Divide the gradient of a bag among its keys as if each were in it once."""

    def mutant(bags: RowBags, of_sums: Any, keys: int) -> Any:
        _, first = np.unique(bags.places, return_index=True)
        number = np.repeat(np.arange(len(bags.lengths)), bags.lengths)[np.sort(first)]
        lengths = np.bincount(number, minlength=len(bags.lengths)).astype(np.int32)
        return method(RowBags(bags.places[np.sort(first)], lengths), of_sums, keys)

    return mutant


def _round_to_less(method: Any) -> Any:
    """Decode rows of 16 bits with a relative error."""

    def mutant(rounded: Rounded, keys: Any, coded: Any) -> Any:
        return method(rounded, keys, coded) * (1 + 2.0**-20)

    return mutant


def _forget_uses(method: Any) -> Any:
    """Copy a shard to a replica without the last uses of its rows."""

    def mutant(table: ShardTable, held: Any) -> None:
        method(table, held)
        table.uses[:] = 0

    return mutant


def _forget_state(method: Any) -> Any:
    """Copy a shard to a replica without the state of its optimizer."""

    def mutant(table: ShardTable, held: Any) -> None:
        method(table, held)
        if table.rows.state is not None:
            table.rows.state.zero_()

    return mutant


def _settle_unreplicated(method: Any) -> Any:
    """Treat entries of the primary as present on all replicas."""
    return property(lambda self: self.version >= 0)


def _promote_stale(method: Any) -> Any:
    """On a loss promote a server that is not in the chain, or that is still copying the shard."""

    def mutant(self: ShardPlacement, gone: Any) -> bool:
        gone = list(gone)
        survived = bool(method(self, gone))
        for chain in self.chains if survived and gone else ():
            chain[:0] = [server for server in sorted(self.places) if server not in chain][:1]
        return survived

    return mutant


def _transfer_no_pushes(method: Any) -> Any:
    """Hand a shard over with the numbers of the staged pushes and without their payloads."""

    def mutant(self: ClockAggregation) -> tuple[bytes, memoryview]:
        orders = [(clock, order) for (clock, _), order in self._orders.items()]
        head = StagedTransfer(dict(self.taken), orders, [], sorted(self.saves))
        return msgspec.msgpack.encode(head), memoryview(b"")

    return mutant


def _cut_each_shard_apart(method: Any) -> Any:
    """Cut a lost worker's pushes at each shard's own last clock."""

    def mutant(self: DenseServer, rank: int, clock: int) -> Any:
        own = [machine.last_clock_of(rank) for machine in self.shards.values() if machine.leads]
        outputs = self._call_each_shard(lambda machine: machine.drop_pushes_after(rank, machine.last_clock_of(rank)))
        return outputs + self._give_orders(self._ledger.remove_rank(rank, max(own, default=clock)))

    return mutant


def _allow_older_version(method: Any) -> Any:
    """Let a worker read versions one clock older than permitted."""

    def mutant(self: ReceiveBuffers, clock: int, exact: bool) -> int:
        return max(min(clock, self._terms.base), int(method(self, clock, exact)) - 1)

    return mutant


def _reverse_ranks(method: Any) -> Any:
    """Sum ranks in reverse order."""
    return lambda self, clock: tuple(reversed(method(self, clock)))


def _ignore_readers(method: Any) -> Any:
    """Step values in place while a worker may still read them."""
    return lambda self, *of: False


def _copy_late(method: Any) -> Any:
    """Copy for a checkpoint whichever version is current at the time of the copy."""

    def mutant(self: DenseShard) -> Any:
        due = {version for version in self.staging.saves if self.version is not None and self.version > version}
        self.staging.saves -= due
        copies = [Snapshot(version, self.shard.index, self.state.checkpoint()) for version in sorted(due)]
        self._saved = max([self._saved, *due])
        return copies

    return mutant


def _never_drop(method: Any) -> Any:
    """Never drop unacknowledged orders."""
    return lambda self, clock: None


def _renumber_old_update(method: Any) -> Any:
    """Treat an update that was applied before as the next one."""

    def mutant(self: TableShard, entry: TableEntry) -> bool:
        last = self.sequences.get(entry.worker, -1)
        if entry.what == "update" and entry.sequence <= last:
            entry = replace(entry, sequence=last + 1)
        return bool(method(self, entry))

    return mutant


def _drop_whole_group(method: Any) -> Any:
    """Drop a whole group of single pushes when one of them was applied before."""

    def mutant(self: EntryPart, after: int, until: int) -> EntryPart:
        kept = method(self, after, until)
        return kept if kept is self else method(self, until, until)

    return mutant


def _apply_whole_group(method: Any) -> Any:
    """Apply a whole group of single pushes, also those that were applied before."""
    return lambda self, after, until: self


def _keep_borrowed_payload(method: Any) -> Any:
    """Keep a payload after Done without a copy of it."""
    return lambda self, message, payload: payload


def _acknowledge_unreplicated(method: Any) -> Any:
    """Acknowledge updates that only the primary has."""
    return lambda self, shard: self.shards_here[shard].state.version if shard in self.shards_here else -1


def _accept_any_term(method: Any) -> Any:
    """Accept updates of an earlier term."""
    return lambda self, shard, term: shard in self.shards_here and self.shards_here[shard].leads


def _continue_refused_session(method: Any) -> Any:
    """Continue a session after a message that was not understood."""

    def mutant(self: TableServer, worker: int, message: Any, payload: memoryview) -> Any:
        for opened in self.stores.values():
            if worker in opened.sessions:
                opened.sessions[worker].ignored_until = -1
        return method(self, worker, message, payload)

    return mutant


def _snapshot_first_copy(method: Any) -> Any:
    """Copy a shard in its state at the first copy."""
    copies: dict[int, tuple[Any, Any]] = {}

    def mutant(self: ReplicatedTables) -> Any:
        return copies.setdefault(id(self), (self, method(self)))[1]

    return mutant


def _request_no_single_pushes(method: Any) -> Any:
    """When a host's sum is given up, do not ask the other ranks for pushes of their own."""

    def mutant(self: PushStaging, rank: int, message: Any) -> None:
        before = set(self.given_up)
        method(self, rank, message)
        self.given_up = before

    return mutant


def _never_pull_again(method: Any) -> Any:
    """Do not pull from the servers what a lost collector would have forwarded."""

    def mutant(self: DenseClient, rank: int) -> Any:
        outputs = method(self, rank)
        return [one for one in outputs if not (isinstance(one, ToServer) and isinstance(one.message, Pull))]

    return mutant


def _keep_values(method: Any) -> Any:
    """Do not forward values to workers that wait for them."""

    def mutant(self: ValueRelay, head: Any, values: Any) -> Any:
        method(self, head, values)
        return []

    return mutant


def _forward_older_values(method: Any) -> Any:
    """Forward the values that are there, also when they are older than those wanted."""

    def mutant(self: ValueRelay, rank: int, shard: int, message: Any) -> Any:
        return method(self, rank, shard, replace(message, oldest=0))

    return mutant


def _sum_without_hosts(method: Any) -> Any:
    """Sum rank by rank and not host by host where ranks push for themselves."""

    def mutant(self: ClockAggregation, pushes: Any) -> None:
        for _, staged in pushes:
            self._add(staged)

    return mutant


def _keep_waiting(method: Any) -> Any:
    """Keep waiting for a host's sum when the connection to its collector breaks."""

    def mutant(self: HostCollection, rank: int) -> Any:
        self._up.discard(rank)
        return []

    return mutant


def _carry_out_first(method: Any) -> Any:
    """Carry the instructions of an input out before it is in the journal."""

    def mutant(self: JournaledStateMachine, given: Any, now: float) -> None:
        append, later = self._journal.append, []
        self._journal = _Journal(lambda *record: later.append(record))
        try:
            method(self, given, now)
        finally:
            self._journal = append.__self__
        for record in later:
            append(*record)

    return mutant


class _Journal:
    """A journal whose inputs are written later."""

    def __init__(self, append: Any) -> None:
        self.append = append


def _forget_last(method: Any) -> Any:
    """Do not repeat the instructions of the last input at a takeover."""

    def mutant(self: JournaledStateMachine, restored: Any, *more: Any) -> None:
        restored.instructions = []
        method(self, restored, *more)

    return mutant


def _begin_journal_first(method: Any) -> Any:
    """Begin the new journal before the instructions of the last input are repeated."""

    def mutant(self: JournaledStateMachine, restored: Any, *more: Any) -> None:
        self._state.number += 1
        Journal(self._folder, self._state, NoCopy())
        method(self, restored, *more)

    return mutant


def _repeat_all(method: Any) -> Any:
    """Carry out every instruction of the last input again, as if it had not been."""

    def mutant(self: JournaledStateMachine, restored: Any, taken: Any, now: float, again: Any) -> None:
        method(self, restored, taken, now, self._carry_out)

    return mutant


def _count_not(method: Any) -> Any:
    """Do not count the messages of workers and servers in their sessions."""

    def mutant(self: MemberSessions, given: Any) -> bool:
        counts = {member: session.received for member, session in self.by_member.items()}
        new = bool(method(self, given))
        for member, session in self.by_member.items():
            if not new and member.role != "agent":
                session.received = counts[member]
        return new

    return mutant


def _keep_not(method: Any) -> Any:
    """Do not keep messages that are sent."""
    return lambda self, member, message: None


def _acknowledge_at_arrival(method: Any) -> Any:
    """Acknowledge a message when it arrives and not when it is in the journal."""

    def mutant(self: CoordinatorConnections, peer: Any, message: Any) -> None:
        session = self._sessions.by_member.get(peer.member)
        if session is not None and is_numbered(message):
            peer.send(MessagesReceived(session.received + 1))
        method(self, peer, message)

    return mutant


def _resume_without_rest(method: Any) -> Any:
    """Do not send again what a member has not received."""

    def mutant(self: CoordinatorConnections, member: Any, new: bool) -> None:
        session = self._sessions.by_member.get(member)
        if session is not None:
            session.acknowledge(session.next)
        method(self, member, new)

    return mutant


def _accept_old_connections(method: Any) -> Any:
    """Take messages of a connection that the member has replaced."""
    return lambda self, peer, message: self._put(MessageReceived(peer.member, message))


def _forget_promises(init: Any) -> Any:
    def begin(self: Voter, me: int, configuration: Configuration, *, restarted: bool = False) -> None:
        init(self, me, configuration)

    return begin


def _deny_candidacy(_: Any) -> Any:
    return property(lambda self: self.promise is not None and self.promise.leader == self.me)


def _hear_old_leaders(method: Any) -> Any:
    """Follow an earlier leader again, though another host has the vote."""

    def mutant(self: Voter, configuration: Configuration) -> bool:
        self.promise = None
        return bool(method(self, configuration))

    return mutant


def _vote_for_stale(method: Any) -> Any:
    """Vote for a standby though a newer configuration, perhaps without it, is known."""

    def mutant(self: Voter, candidate: int, wanted: VoteWanted, *, is_leader_silent: bool) -> VoteGiven:
        if wanted.binding and is_leader_silent:
            self.promise = wanted.configuration.elects(candidate)
        return VoteGiven() if is_leader_silent else VoteGiven("the leader is in reach")

    return mutant


def _withdraw_votes(method: Any) -> Any:
    """Take a vote back while the election goes on."""

    def mutant(self: Voter, host: int, configuration: Configuration, *, stands: bool) -> None:
        method(self, host, configuration, stands=False)

    return mutant


def _carry_out_unstored(method: Any) -> Any:
    """Carry out what the standby has not stored."""
    return lambda self: True


def _without_majority(method: Any) -> Any:
    """Let a configuration hold when any agent has accepted it."""

    def mutant(self: Replication, host: int, term: int, version: int) -> None:
        for each in self.newest.voters:
            method(self, each, term, version)

    return mutant


def _forget_electable(method: Any) -> Any:
    """Take the standby of the newest configuration for the only one that can be elected."""
    return property(lambda self: self.newest.standby is not None)


def _half_is_enough(method: Any) -> Any:
    """Take half of the votes for a majority."""
    return lambda self, hosts: 2 * len(hosts & set(self.voters)) >= len(self.voters)


def _tell_all_at_once(method: Any) -> Any:
    """Send a configuration to all agents before the leader's own has it."""

    def mutant(self: Replication) -> list[int]:
        return [] if self.proposed is None else sorted({*self.proposed.voters, *self.committed.voters})

    return mutant


def _succeed_blindly(method: Any) -> Any:
    """Let a successor on the same host take the configuration that it finds for the only one."""

    def mutant(self: Replication, committed: Any, newest: Any, *, is_successor: bool) -> None:
        method(self, committed, newest, is_successor=is_successor)
        self._electable.discard(UNKNOWN)

    return mutant


def _stand_with_part(method: Any) -> Any:
    """Make a host the standby before it has stored all that was sent."""

    def mutant(self: Replication) -> Any:
        stored, self.stored = self.stored, self.sequence
        try:
            return method(self)
        finally:
            self.stored = stored

    return mutant


def _restore_older(method: Any) -> Any:
    """Make each snapshot without its sessions."""

    def mutant(self: Journal) -> None:
        sessions, self._state.sessions = self._state.sessions, MemberSessions()
        method(self)
        self._state.sessions = sessions

    return mutant


MUTANTS = (
    Mutant(
        "orders in backward are not withdrawn",
        (
            (PushStaging, "withdraw_orders_in_backward", lambda method: lambda self, before: None),
            (BackwardLedger, "withdraw", lambda method: lambda self: 0),
        ),
        118,
        simulation="backward",
    ),
    Mutant(
        "takeover: instructions first", ((JournaledStateMachine, "handle", _carry_out_first),), 0, simulation="takeover"
    ),
    Mutant(
        "takeover: a forgotten instruction",
        ((JournaledStateMachine, "take_over", _forget_last),),
        0,
        simulation="takeover",
    ),
    Mutant(
        "takeover: a journal begun too early",
        ((JournaledStateMachine, "take_over", _begin_journal_first),),
        0,
        simulation="takeover",
    ),
    Mutant(
        "takeover: events written twice", ((JournaledStateMachine, "take_over", _repeat_all),), 0, simulation="takeover"
    ),
    Mutant("takeover: messages not counted", ((MemberSessions, "on_input", _count_not),), 0, 600, "takeover"),
    Mutant("takeover: messages not kept", ((MemberSessions, "_keep", _keep_not),), 0, 600, "takeover"),
    Mutant(
        "takeover: acknowledged too early",
        ((CoordinatorConnections, "_put_message", _acknowledge_at_arrival),),
        0,
        simulation="takeover",
    ),
    Mutant(
        "takeover: nothing sent again",
        ((CoordinatorConnections, "start_session", _resume_without_rest),),
        0,
        simulation="takeover",
    ),
    Mutant(
        "takeover: old connections count",
        ((CoordinatorConnections, "_put_message", _accept_old_connections),),
        0,
        simulation="takeover",
    ),
    Mutant(
        "takeover: a snapshot without sessions",
        ((Journal, "make_snapshot", _restore_older),),
        0,
        simulation="takeover",
    ),
    Mutant(
        "no dedupe",
        ((DenseShard, "push_buffer_for", _renumber_old_push), (DenseShard, "on_push", _renumber_old_push)),
        16,
    ),
    Mutant("acknowledge before the replica", ((ReplicaChain, "settled", _settle_unreplicated),), 1),
    Mutant("stale promotion", ((ShardPlacement, "remove_lost", _promote_stale),), 19),
    Mutant("lost hand-over delta", ((ClockAggregation, "staged_state", _transfer_no_pushes),), 32),
    Mutant("a death cut at different clocks on two shards", ((DenseServer, "count_until", _cut_each_shard_apart),), 63),
    Mutant("gradient overwritten before its acknowledgement", ((SendBuffers, "__init__", _share_send_buffer),), 13),
    Mutant("read older than the staleness allows", ((ReceiveBuffers, "oldest_version", _allow_older_version),), 0),
    Mutant("ranks summed in another order", ((Membership, "at", _reverse_ranks),), 13),
    Mutant("values stepped while they are read", ((VersionReaders, "may_read", _ignore_readers),), 2),
    Mutant("a checkpoint of several versions", ((DenseShard, "_snapshot", _copy_late),), 37),
    Mutant(
        "workers learn of new members before servers", ((example_division, "_are_set", _tell_workers_first),), 14871
    ),
    Mutant("new members begin at any answer", ((example_division, "on_next_clock", _take_last_answer),), 203),
    Mutant("a rank that joins again counts from its first term", ((Membership, "since", _forget_terms),), 42),
    Mutant("workers leave before their last clock", ((example_division, "_new_terms", _leave_at_once),), 184),
    Mutant("an elastic job loses the examples of a lost worker", ((server_changes, "decision", _not_elastic),), 845),
    Mutant("orders are never dropped", ((UnackedPushes, "_drop", _never_drop),), 111),
    Mutant("no own pushes after a host's sum is given up", ((PushStaging, "give_up", _request_no_single_pushes),), 365),
    Mutant("a host is not summed first", ((ClockAggregation, "_add_host", _sum_without_hosts),), 23),
    Mutant(
        "racks: a lost collector's values are not pulled",
        ((DenseClient, "on_peer_disconnected", _never_pull_again),),
        52,
        simulation="racks",
    ),
    Mutant("racks: values are not forwarded", ((ValueRelay, "on_values", _keep_values),), 46, simulation="racks"),
    Mutant("racks: older values are sent", ((ValueRelay, "on_wanted", _forward_older_values),), 46, simulation="racks"),
    Mutant("a worker waits for a lost collector", ((HostCollection, "on_peer_disconnected", _keep_waiting),), 52),
    Mutant("votes: an earlier leader is heard", ((Voter, "adopt", _hear_old_leaders),), 4, 3000, "leadership"),
    Mutant("votes: a stale standby is elected", ((Voter, "vote", _vote_for_stale),), 16, 3000, "leadership"),
    Mutant("votes: a booted host votes at once", ((Voter, "__init__", _forget_promises),), 4, 3000, "leadership"),
    Mutant(
        "votes: a booted leader denies its election",
        ((Voter, "stands", _deny_candidacy),),
        9397,
        3000,
        "leadership",
    ),
    Mutant(
        "votes: taken back later",
        ((Voter, "on_configuration", _withdraw_votes),),
        511,
        3000,
        "leadership",
    ),
    Mutant(
        "copy: carried out before it is stored",
        ((Replication, "may_carry_out", _carry_out_unstored),),
        0,
        3000,
        "leadership",
    ),
    Mutant("copy: a standby with a part", ((Replication, "make_standby", _stand_with_part),), 45, 3000, "leadership"),
    Mutant("configurations: no majority", ((Replication, "accepted_by", _without_majority),), 0, 3000, "leadership"),
    Mutant(
        "configurations: only the newest standby is electable",
        ((Replication, "has_electable", _forget_electable),),
        0,
        3000,
        "leadership",
    ),
    Mutant(
        "configurations: half is a majority",
        ((Configuration, "is_majority", _half_is_enough),),
        404,
        3000,
        "leadership",
    ),
    Mutant(
        "configurations: not the leader's own agent first",
        ((Replication, "awaited", _tell_all_at_once),),
        410,
        3000,
        "leadership",
    ),
    Mutant(
        "configurations: a successor that knows no other",
        ((Replication, "__init__", _succeed_blindly),),
        0,
        3000,
        "leadership",
    ),
    Mutant("tables: no dedupe", ((TableShard, "apply", _renumber_old_update),), 0, simulation="tables"),
    Mutant("tables: a group dropped whole", ((EntryPart, "only", _drop_whole_group),), 339, simulation="tables"),
    Mutant("tables: a group applied whole", ((EntryPart, "only", _apply_whole_group),), 18, simulation="tables"),
    Mutant(
        "tables: payload kept without a copy",
        ((OpenedStore, "lasting_payload", _keep_borrowed_payload),),
        0,
        simulation="tables",
    ),
    Mutant(
        "tables: acknowledge before the replica",
        ((TableServer, "_acknowledged", _acknowledge_unreplicated),),
        8,
        simulation="tables",
    ),
    Mutant("tables: stale promotion", ((ShardPlacement, "remove_lost", _promote_stale),), 2, simulation="tables"),
    Mutant(
        "tables: lost hand-over delta", ((ReplicatedTables, "snapshot", _snapshot_first_copy),), 0, simulation="tables"
    ),
    Mutant(
        "tables: no answer after an early one",
        ((ShardTable, "changed_since", _find_no_change),),
        33,
        simulation="tables",
    ),
    Mutant("tables: a bag's key counts once", ((RowBags, "gradients", _count_a_key_once),), 4, simulation="tables"),
    Mutant("tables: a code is another value", ((Rounded, "decode", _round_to_less),), 3, simulation="tables"),
    Mutant("tables: last uses not copied", ((table_bytes, "_fill", _forget_uses),), 37, simulation="tables"),
    Mutant("tables: optimizer state not copied", ((table_bytes, "_fill", _forget_state),), 37, simulation="tables"),
    Mutant("tables: term ignored", ((TableServer, "_is_led", _accept_any_term),), 96, simulation="tables"),
    Mutant(
        "tables: session ignored",
        ((TableServer, "on_worker_message", _continue_refused_session),),
        0,
        simulation="tables",
    ),
)


class StaleMutant(Exception):
    """A mutant names an attribute that the product does not have."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the defect for the duration of a block.

    Raises:
        StaleMutant: a patched class has no such method; nothing is patched.
    """
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in mutant.patches if not hasattr(owner, name)]
    if missing:
        raise StaleMutant(f"{mutant.name}: there is no {', '.join(missing)}")
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in mutant.patches]
    for owner, name, make in mutant.patches:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, method in before:
            if method is None:
                delattr(owner, name)  # the method is inherited
            else:
                setattr(owner, name, method)


def hunt(mutant: Mutant, first: int = 0) -> tuple[int, Outcome] | None:
    """Return (number of seeds, outcome of the seed that caught it), or None.

    A seed that fails without the defect too does not count.

    Raises:
        StaleMutant: a patched class, or an object that the mutant reads, lacks an attribute that the mutant names.
    """
    for seed in range(first, first + mutant.seed_limit):
        with planted(mutant):
            outcome = SIMULATIONS[mutant.simulation](seed)
        if "AttributeError" in outcome.text:
            raise StaleMutant(f"{mutant.name}, seed {seed}: {outcome.text}")
        if outcome.invariant and not SIMULATIONS[mutant.simulation](seed).invariant:
            return seed - first + 1, outcome
    return None
