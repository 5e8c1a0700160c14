"""The (key, value) store in a training script: `run.store()` with push, pull, wait, clock.

Threads. One lock guards the state machine (ps/tables/client/table_client_state.py) and the connections. The reader
threads of the connections and the threads of the script acquire it; messages are queued under it and sent later.
Callbacks run after the lock is released. A wait ends with JobFailed when the servers refuse to continue, with PeerLost
when a shard has no leader or a server has no connection for PATIENCE seconds, and with TimedOut when a server does not
answer a query for PATIENCE seconds. Slow workers do not end a wait (client/server_waits.py).

Pushes and pulls of a single key use a fast path, because a step may have thousands of them: it skips routing and
merging, and sends the calls in batches (ps/tables/client/single_key_batches.py). The general path is used when the key
is new, when the call depends on other tasks, and when the row is large.
"""

# long: one method a call of the script, most of it documentation

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from psctl.client.server_waits import ServerWaits
from psctl.clock import SystemClock
from psctl.errors import UsageError
from psctl.kv import arguments as given
from psctl.kv.arguments import CheckedKey, Key, Value
from psctl.kv.prefetched_rows import EarlyRead, PrefetchedRows
from psctl.kv.store_connections import StoreServers
from psctl.kv.tickets import Callback, Result, Tasks, Ticket
from psctl.process.user_functions import JobFunctions, name_of
from psctl.ps.outputs import ToServer
from psctl.ps.table_messages import StoreSpec, TableFromServer, TableSpec
from psctl.ps.tables.client.calls_in_flight import (
    PooledRoute,
    TableChange,
    TableRead,
    WantedSums,
    pooled_route,
    result,
)
from psctl.ps.tables.client.key_routes import KeyRoute
from psctl.ps.tables.client.table_client_state import TableClient
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.row_filters import filter_specs
from psctl.ps.tables.row_index import LEAST, MOST
from psctl.ps.tables.table_kinds import TableKind, UserFunction, check_table
from psctl.ps.tables.table_state import FOREVER, checked_settings, first_sequence_at, merged
from psctl.transport.peer_connection import PeerConnection

PATIENCE = 60.0
"""Seconds that a server may leave a query unanswered, and that a shard may have no leader."""

MOST_IN_FLIGHT = 256 << 20
"""Bytes of pushes that may be in flight; a push beyond this limit waits."""

INTERNAL = 1 << 40
"""First ticket number of the store's internal calls."""


class RunPosition(Protocol):
    """The position of a run in its steps."""

    @property
    def step_mark(self) -> int:
        """A number that never decreases and differs between steps."""

    @property
    def last_boundary(self) -> int:
        """The newest step after which the run has passed the point where checkpoints are taken."""

    @property
    def keeps_states(self) -> bool:
        """Whether a worker that replaces a lost one takes a state that is stored between two steps."""

    def settle(self) -> bool:
        """Where lost workers are not replaced, wait until finished steps are certain to count; return whether it
        waited."""


class Store:
    """A (key, value) store that all workers share; `run.store()` returns it.

        store = run.store()
        ticket = store.push("w", gradient)           # reduced with the stored value, by sum
        store.wait(ticket)
        w = store.pull("w")

    **Keys.** A name (a str) identifies one tensor of any shape; a large tensor is stored in blocks on several servers.
    An integer (64 bits) identifies one row; all rows have one shape: `push(keys, rows)`, `pull(keys)`, where keys is a
    list, a tensor, a range or a single int. Only rows that were pushed use memory; an absent row reads as zero, or as
    its declared initial value. `pull(range(...))` returns (keys, rows) of the rows that exist. One call may have
    several names: `push({"a": x, "b": y})`, `pull(["a", "b"])`. A call is one message to each server that stores a part
    of it, and has at most 2^26 integer keys and 16 GiB of rows.

    **Reductions.** A push reduces its value with the stored value: by sum, or by the `reduce` given when the key is
    first pushed or declared: mean, min, max, prod, logical-and/or/xor, bitwise-and/or/xor, logsumexp, argmin (push and
    pull pairs (values, indices)), or your own function of two tensors, from a module in the job's folder. The function
    must be commutative and associative; the store tests that. The reduction of a key does not change.

    **Visibility of a push.** The worker that pushed sees its push at once. When other workers see it depends on the
    store's `consistency`:

        asp         as soon as the push has arrived at the server; no worker waits for another. The default.
        bsp         once all workers have called `clock()` after the push; then all pushes of that clock become visible
                    together, equal for all workers, reduced in the order of ranks: results are reproducible to the bit.
        {"ssp": s}  at most s clocks after the clock of the push, perhaps sooner. A worker is at most s clocks ahead of
                    the slowest one; `clock()` waits while it would be further ahead.

    Under bsp and ssp the store caches rows that were read while they are new enough. With `reads="lazy"` it requests
    newer rows when they are not; with `reads="eager"` the servers send rows when they change: reads are fresher, and
    more bytes are sent.

    **Exactly once.** A push is applied once, also when connections break. It is identified by the step of the run and
    its number within the step, so a replacement worker that replays a step applies no push twice.

    Every method that waits raises PeerLost (a server is lost), TimedOut (a server does not answer) or JobFailed (the
    servers refuse to continue; the message has the reason).

    Args of the constructor, which `run.store()` calls:
        spec: the specification of the store.
        rank: the rank of this worker.
        servers: the connections to the servers.
        at: the position of the run in its steps.
        functions: reductions and users' functions.
        after: the last sequence of this store when it was closed before; -1: it was not open before.
    """

    def __init__(
        self,
        spec: StoreSpec,
        rank: int,
        servers: StoreServers,
        at: RunPosition,
        functions: JobFunctions,
        after: int = -1,
    ) -> None:
        self.name = spec.name
        self.rank = rank
        self._spec, self._servers, self._at = spec, servers, at
        self._functions = functions
        self._marked = at.last_boundary if rank in spec.group else FOREVER
        self._state = TableClient(
            spec, rank, functions, max(after, first_sequence_at(at.step_mark) - 1), servers.allocate
        )
        self._lock = threading.RLock()
        self._waits = ServerWaits(self._lock, self._state, servers.connections, SystemClock(), PATIENCE)
        self._tasks = Tasks()
        self._numbers = 0  # of the script's tickets
        self._internal = INTERNAL
        self._internal_finished: set[int] = set()  # internal tickets that have finished
        self._results: dict[int, Callable[[], Result]] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._closed = False
        self._prefetched = PrefetchedRows()
        self._waits_for_others = False  # since the last `clock()`
        servers.open(spec.name, self)
        with self._lock:
            self._wait_until(f"store {spec.name!r}", lambda: self._state.is_open, self._all_shards)

    # ---- keys ----------------------------------------------------------------------------------------------------

    @staticmethod
    def key(text: str) -> int:
        """Return an integer key for a text: a 64-bit hash, equal on all workers."""
        return given.hash_of(text)

    def declare(
        self,
        key: str | type[int],
        value: Value | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        reduce: str | UserFunction = "sum",
        apply: str | UserFunction = "",
        initial: float | str | UserFunction | Mapping[str, object] | None = None,
        optimizer: str | Mapping[str, object] | None = None,
        admit: Mapping[str, float] | None = None,
        expire: int | None = None,
        capacity: int | str | None = None,
        filters: Sequence[object] | None = None,
    ) -> None:
        """Declare the shape, dtype and reduction of a key before it is pushed; every rank declares the same.

        Args:
            key: a name; or `int` for the rows of all integer keys.
            value: the initial value, for a name only; the servers keep the first declaration that arrives.
            shape: the shape of the tensor, or of one row; ignored when `value` is given.
            dtype: the type of the elements; ignored when `value` is given.
            reduce: the reduction of pushes.
            apply: a function (stored, pushed) -> stored of tensors of rows. It runs on the servers for every push
                (under bsp: for the reduced pushes of a clock) and returns the new value, for example an optimizer's
                step. For a name it must be elementwise, because the tensor is stored in blocks.
            initial: the initial value of an absent row: a number; {"normal": DEVIATION, "seed": N} or
                {"uniform": LIMIT, "seed": N}, which depend on the seed, the store and the key alone; or a function
                (keys, width) -> rows. Without it, a pull of an absent row returns zero, and the first push becomes its
                value.
            optimizer: pushes are gradients, which this optimizer applies on the servers, to the rows that have one:
                {"name": "adagrad", "lr": 0.05}; also sgd, rowwise-adagrad, adam, ftrl (ps/tables/row_optimizers.py has
                their settings). `reduce` combines the gradients of a clock under bsp: sum or mean. Only servers have
                the optimizer's state, so a worker sees its own push when the servers have applied it.
            admit: which absent integer keys a push gives a row: {"count": 3} from the third push on, counted in
                constant memory; {"probability": 0.1, "seed": 0} one in ten keys, chosen by a hash of key and seed; or
                both. Other pushes to absent keys are dropped.
            expire: clocks without a push after which a row leaves, or up to an eighth later; not for asp stores.
            capacity: bytes of all rows with their state and keys ("1GB"); beyond it those leave whose last push is
                oldest.
            filters: which pushed rows of integer keys are sent, and in which form, in this order (docs/store.md):
                {"random_skip": P}, {"significance": V}, {"kkt": {"every": N}}, "bf16", "fp16", "int8", and your own
                subclass of psctl.RowFilter: "module:Class", or {"module:Class": {"setting": value}}.

        Raises:
            UsageError: the key is declared already with other properties, or an argument is invalid.
        """
        name = given.table_name(key, "declared")
        shape, kind_of_number = given.declared_rows(name, value, shape, dtype)
        how, step = given.checked_function(reduce, "reduce"), given.checked_function(apply, "apply")
        first, rule = given.checked_initial(initial, kind_of_number, self.name), given.checked_optimizer(optimizer)
        limits = given.checked_admission(admit), given.checked_expiry(expire), given.checked_capacity(capacity)
        chain = filter_specs(filters)
        spec = given.checked_spec(TableSpec(name, shape, kind_of_number, how, step, first, rule, *limits, chain))
        check_table(self._spec, spec)
        with self._lock:
            kind = self._make_kind(spec)
            if value is not None:
                self._push([(name, value, kind)], "start", f"declare {name!r}", (), None)

    # ---- push, pull, wait ----------------------------------------------------------------------------------------

    def push(
        self,
        key: Key | Mapping[str, Value],
        value: Value | None = None,
        *,
        reduce: str | UserFunction | None = None,
        after: Sequence[Ticket] = (),
        callback: Callback | None = None,
    ) -> Ticket:
        """Reduce a value into the stored value of a key, without waiting for the push to finish.

        The tensor is copied: the caller may change it when `push` returns. `push` blocks only at the first use of a
        key, which requests its description from the servers, and while 256 MiB of earlier pushes are in flight.

        Args:
            key: a name, integer keys (a key that occurs twice is reduced twice), or a dict of names and values.
            value: for a name a tensor of its shape; for n integer keys rows of shape (n, *row shape); or one number
                for all elements. None when `key` is a dict.
            reduce: the reduction; None: the reduction of the key's first push or declaration, else sum.
            after: tickets that must finish before the push is sent. This worker sees the push at once.
            callback: called with None when all replicas have the push.

        Returns:
            The ticket of the push.

        Raises:
            UsageError: the value does not fit the key, or the key has another reduction.
        """
        if reduce is None and not after and (type(key) is int or type(key) is str):
            one = self._push_one(key, value, given.checked_callback(callback))
            if one is not None:
                return one
        if isinstance(key, Mapping) and value is not None:
            raise UsageError("push of a dict and a separate value", "give the values in the dict: push({name: value})")
        asked = key.items() if isinstance(key, Mapping) else [(key, value)]
        pairs = [(given.checked_key(each), given.checked_value(each, what)) for each, what in asked]
        after, callback = given.checked_after(after), given.checked_callback(callback)
        with self._lock:
            self._check(writes=True)
            self._wait_for_space()
            items = [(each, what, self._kind_for_push(each, what, reduce)) for each, what in pairs]
            what = f"push {given.describe_key(key if isinstance(key, Mapping) else pairs[0][0])}"
            ticket = self._push(items, "push", what, after, callback)
        self._run_callbacks()
        return ticket

    def pull(self, key: Key | Sequence[str], *, after: Sequence[Ticket] = ()) -> Result:
        """Return the value of a key, as fresh as the store's consistency requires; blocks until it has arrived.

        Args:
            key: a name, a list of names, integer keys, or a range.
            after: tickets that must finish before the pull starts.

        Returns:
            For a name its tensor; for n integer keys rows of shape (n, *row shape), in the order of the keys (for a
            single int its row); for a `range` the pair (keys, rows) of its integers that have a row, in the order of
            the range; for a list of names a dict of tensors. The tensors are new. With reduce="argmin" each value is a
            pair (values, indices).

        Raises:
            UsageError: the key was neither pushed nor declared, or is invalid.
        """
        self._wait_for_late()
        rows = self._take_prefetched(key) if self._prefetched and not after else None
        return rows if rows is not None else self.fetch(key, after=after).wait()

    def prefetch(self, keys: Sequence[int] | torch.Tensor) -> None:
        """Request the rows that a pull of these integer keys returns in the next clock (asp: at the next pull of them).

        `pull` with the same keys takes them, and waits until they are there. The two newest requests are kept.

        Args:
            keys: integer keys.

        Raises:
            UsageError: integer keys were neither pushed nor declared, or are invalid.
        """
        wanted = given.checked_key(keys)
        if isinstance(wanted, str | int | range):
            raise UsageError(f"prefetch of {given.describe_key(wanted)}", "give integer keys: a list or a tensor")
        with self._lock:
            self._check()
            kind = self._kind_for_pull(wanted)
            ahead, ticket = int(self._spec.staleness is not None), self._internal_ticket()
            read, outs = self._state.start_read([(kind, self._route(kind, wanted))], ticket, ahead=ahead)
            self._prefetched.add(EarlyRead(kind, wanted, self._state.clock + ahead, ticket, read))
            self._send(outs)
            self._finish_tickets()
        self._run_callbacks()

    def route_bags(self, keys: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor) -> PooledRoute:
        """Return the way of bags of rows to the servers, for `pull_sums` and `push_sums`.

        Args:
            keys: distinct integer keys.
            places: the places among them of the keys of each bag, one bag after another.
            lengths: the number of keys of each bag.

        Raises:
            UsageError: the rows have no optimizer, or have filters.
        """
        wanted = given.integer_keys(keys.cpu().numpy())
        bags = RowBags(*(each.cpu().numpy().astype(np.int32) for each in (places, lengths)))
        with self._lock:
            kind = self._kind_for_pull(wanted)
            if kind.optimizer is None or kind.filters is not None:
                raise UsageError(
                    "sums of bags of rows without an optimizer, or with filters", "pull the rows, and add them"
                )
            return pooled_route(kind, self._route(kind, wanted), bags)

    def pull_sums(self, route: PooledRoute) -> torch.Tensor:
        """Return the sum of the rows of each bag, which servers have added; as fresh as `pull`.

        Args:
            route: of the bags.
        """
        with self._lock:
            self._check()
            ticket = self._internal_ticket()
            read, outs = self._state.start_sums(route, ticket)
            self._send(outs)
            self._finish_tickets()
            self._wait_internal("sums of rows", ticket)
        self._run_callbacks()
        want = read.wants[0]
        assert isinstance(want, WantedSums), "it was a read of sums"
        return want.total()

    def push_sums(self, route: PooledRoute, gradients: torch.Tensor) -> Ticket:
        """Push the gradients of sums of bags, which servers divide among the rows of their keys.

        Args:
            route: of the bags.
            gradients: one row for each bag.

        Returns:
            The ticket of the push.
        """
        with self._lock:
            self._check(writes=True)
            self._wait_for_space()
            ticket = self._ticket("push of bags", None)
            changes = self._state.prepare_sums(route, gradients.detach().cpu().to(route.kind.dtype), ticket.number)
            self._tasks.add(ticket, (), lambda: self._send_changes(changes))
            self._finish_tickets()
        self._run_callbacks()
        return ticket

    def fetch(
        self,
        key: Key | Sequence[str],
        *,
        after: Sequence[Ticket] = (),
        callback: Callback | None = None,
    ) -> Ticket:
        """Start a pull without waiting for the value.

        Args:
            key, after: as for `pull`.
            callback: called with the value when it has arrived.

        Returns:
            The ticket of the pull; its `wait` returns the value.

        Raises:
            UsageError: the key was neither pushed nor declared, or is invalid.
        """
        if not after and (type(key) is int or type(key) is str):
            one = self._fetch_one(key, given.checked_callback(callback))
            if one is not None:
                return one
        group = given.is_group(key)
        keys = [given.checked_key(each) for each in (key if group else [key])]  # type: ignore[union-attr]
        after, callback = given.checked_after(after), given.checked_callback(callback)
        with self._lock:
            self._check()
            parts = [(each, self._kind_for_pull(each)) for each in keys]
            ticket = self._ticket(f"pull {given.describe_key(key if group else keys[0])}", callback)

            def begin() -> None:
                wanted = [(kind, each if isinstance(each, range) else self._route(kind, each)) for each, kind in parts]
                read, outs = self._state.start_read(wanted, ticket.number)
                self._results[ticket.number] = lambda: self._read(read, parts, keys if group else None)
                self._send(outs)

            self._tasks.add(ticket, after, begin)
            self._finish_tickets()
        self._run_callbacks()
        return ticket

    def wait(self, ticket: Ticket | Iterable[Ticket], timeout: float | None = None) -> Result:
        """Wait until one or several tickets have finished.

        Args:
            ticket: one ticket, or several.
            timeout: seconds to wait for each ticket; None: no limit while the servers answer.

        Returns:
            The result of the ticket, or a list of results for several: the pulled value, None for a push or a call.

        Raises:
            TimedOut: `timeout` passed, or a server does not answer.
            PeerLost, JobFailed: see the class.
        """
        timeout = given.checked_timeout(timeout)
        if isinstance(ticket, Ticket):
            return ticket.wait(timeout)
        return [each.wait(timeout) for each in given.checked_tickets(ticket, "wait for ")]

    def call(
        self,
        function: str | UserFunction,
        key: Key | type[int],
        *,
        after: Sequence[Ticket] = (),
        **arguments: float | int | str | bool | None,
    ) -> Ticket:
        """Run a function on the servers, on the stored rows of a key; it counts as a push and is applied once.

        Args:
            function: (keys, rows, **arguments) -> rows, from a module in the job's folder. `rows` is the stored tensor
                of shape (keys, elements of a row), for the keys that have a row.
            key: a name, integer keys, or `int` for all rows of integer keys.
            after: tickets that must finish before the call is sent.
            arguments: plain values that the function receives.

        Returns:
            The ticket of the call; its result is None.

        Raises:
            UsageError: the key was neither pushed nor declared, or an argument is invalid.
        """
        rows = None if key is int else given.checked_key(key)
        after, arguments = given.checked_after(after), given.checked_arguments(arguments)
        name = name_of(function)
        self._functions.function(name)
        with self._lock:
            self._check(writes=True)
            kind = self._kind_for_pull("" if rows is None else rows)
            route = None if rows is None else self._route(kind, rows)
            ticket = self._ticket(f"call {name}", None)
            self._prefetched.clear()
            changes = self._state.prepare_call(kind, route, name, arguments, ticket.number)
            self._tasks.add(ticket, after, lambda: self._send_changes(changes))
            self._finish_tickets()
        self._run_callbacks()
        return ticket

    def configure(self, key: str | type[int], **settings: float) -> Ticket:
        """Change settings of the optimizer of a key, such as its learning rate; every rank makes the same call.

        The change is ordered with this worker's pushes: later ones use it. Under bsp it applies to all pushes of the
        clock in which it is made.

        Args:
            key: a name; or `int` for the rows of all integer keys.
            settings: new values, by name: lr=0.01.

        Returns:
            The ticket of the change; its result is None.

        Raises:
            UsageError: the key has no optimizer, or it has no such setting, or a value is out of range.
        """
        name = given.table_name(key, "configured")
        with self._lock:
            self._check(writes=True)
            kind = self._kind_for_pull(name)
            numbers = checked_settings(kind.spec, settings)
            ticket = self._ticket(f"configure {name or 'integer keys'}", None)
            changes = self._state.prepare_settings(kind, numbers, ticket.number)
            self._tasks.add(ticket, (), lambda: self._send_changes(changes))
            self._finish_tickets()
        self._run_callbacks()
        return ticket

    def stats(self, key: str | type[int] = int) -> dict[str, float]:
        """Return counts of a key's rows on all servers: of rows, of pushes, and of reads.

        Args:
            key: a name; or `int` for the rows of all integer keys.

        Returns:
            keys and bytes (now); pushed rows, and those that existed (pushed_found); admitted, refused, expired and
            evicted rows; rows read by keys, and those that existed (read_found), of the present primaries; the shares
            push_hit_rate and read_hit_rate, NaN without pushes or reads.

        Raises:
            UsageError: the key was neither pushed nor declared.
            TimedOut, PeerLost, JobFailed: see the class.
        """
        name = given.table_name(key, "counted")
        with self._lock:
            self._check()
            self._kind_for_pull(name)
            self._describe(name)
            found = [stats for (table, _), stats in self._state.stats.items() if table == name]
        return given.total_of(found)

    def sent(self) -> dict[str, int]:
        """Return counts of what this worker's filters of integer keys have left of its pushes.

        Returns:
            rows and bytes (keys and values) that the script has pushed, and rows_sent and bytes_sent of them.

        Raises:
            UsageError: integer keys have no filters.
        """
        with self._lock:
            kind = self._kind_for_pull("")
            if kind.filters is None:
                raise UsageError("sent() of integer keys without filters", "declare them with filters=[...]")
            chain = kind.filters
            return {
                "rows": chain.offered, "rows_sent": chain.sent,
                "bytes": chain.offered_bytes, "bytes_sent": chain.sent_bytes,
            }  # fmt: skip

    # ---- clocks and order ----------------------------------------------------------------------------------------

    def clock(self) -> int:
        """End this worker's clock; block while other workers are too far behind.

        All earlier pushes belong to the clock that ends. Every worker of the group makes the same number of calls.
        Where the optimizer steps on servers the next `pull` or `clock` blocks instead: then this worker has passed the
        end of the step, where it stores the state that the replacement of a lost worker takes, and that ends its clock.

        Returns:
            The number of clocks that this worker has finished.

        Raises:
            UsageError: the store is asp, which has no clocks.
            TimedOut, PeerLost, JobFailed: see the class.
        """
        if self._spec.staleness is None:
            raise UsageError(
                "clock() of an asp store, which has no clocks", 'open the store with consistency="bsp" or {"ssp": s}'
            )
        self._wait_for_late()
        self.wait_for_separation(self.send_clocks(self._state.clock + 1))
        self._waits_for_others = True
        if not self._at.keeps_states:
            self._wait_for_late()
        return self._state.clock

    def send_clocks(self, clocks: int, *, common: bool = False) -> int | None:
        """End this worker's clocks up to the given number of them, without waiting for servers or other workers.

        Args:
            clocks: how many have ended then.
            common: end them for all workers, of which each has sent its pushes of these clocks.

        Returns:
            A ticket for `wait_for_separation`, which has to be called; None: they have ended before.
        """
        if clocks <= self._state.clock:
            return None
        cut = self._spec.staleness == 0 and self._at.settle()  # a lost worker is cut at one clock on all shards
        with self._lock:
            self._check(writes=True)
            self._wait_until("pushes that wait for others", lambda: self._tasks.all_started, set)
            if cut:
                self._wait_until(
                    "the pushes of this clock",
                    lambda: not self._state.shards_without_updates,
                    lambda: self._state.shards_without_updates,
                )
            ticket = self._internal_ticket()
            self._send(self._state.finish_clocks(clocks, self._at.step_mark, ticket, common=common))
        return ticket

    def wait_for_separation(self, ticket: int | None) -> None:
        """Return when all replicas know the clocks or the mark that were sent with this ticket."""
        if ticket is not None:
            with self._lock:
                self._wait_internal(f"clock {self._state.clock}", ticket)
            self._run_callbacks()

    def _wait_for_late(self) -> None:
        """Wait for the others if the last `clock()` did not."""
        if self._waits_for_others:
            self._waits_for_others = False
            self.wait_for_others()

    def wait_for_others(self) -> None:
        """Return when the other workers are not too far behind this one's clock for the store's consistency."""
        with self._lock:
            lagging = self._state.lagging_shards
            self._wait_until(f"clock {self._state.clock}", lambda: not lagging(), lagging)
        self._run_callbacks()

    @property
    def clocks(self) -> int:
        """The number of clocks that this worker has finished."""
        return self._state.clock

    @property
    def delay(self) -> int | None:
        """Bounded delay: the number of earlier tasks (pushes, pulls, calls) that may be unfinished when a task starts.

        0: each task starts when the one before has finished. None: each task starts at once. May be set at any time.
        """
        return self._tasks.delay

    @delay.setter
    def delay(self, tasks: int | None) -> None:
        if tasks is not None and (not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 0):
            raise UsageError(f"a delay of {tasks!r} tasks", "give an integer from 0 on, or None")
        with self._lock:
            self._tasks.delay = tasks
            self._finish_tickets()
        self._run_callbacks()

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def flush(self) -> None:
        """Wait until all pushes, pulls and calls have finished.

        Raises:
            TimedOut, PeerLost, JobFailed: see the class.
        """
        while (ticket := self._tasks.oldest) is not None:
            ticket.wait()

    def close(self, *, failed: bool = False) -> None:
        """Wait for all tasks and close the store; other workers no longer wait for this worker's clocks.

        The end of the run closes all stores. Closing a closed store does nothing.

        Args:
            failed: close without waiting for tasks and servers.

        Raises:
            TimedOut, PeerLost, JobFailed: see the class.
        """
        if self._closed:
            return
        try:
            if not failed:
                self.flush()
                with self._lock:
                    if self.rank in self._spec.group:
                        ticket = self._internal_ticket()
                        self._send(self._state.leave(self._at.step_mark, ticket))
                        self._wait_internal("the end of the store", ticket)
        finally:
            self._closed = True
        self._servers.end(self.name, 0.0 if failed else 1.0)

    def mark(self, step: int) -> None:
        """Mark the checkpoint of `step`, once: pushes before this call belong to the checkpoint, later ones do not.

        The call first waits until all tasks that `after` or `delay` holds back have started.
        """
        with self._lock:
            if self._closed or step <= self._marked:
                return
            self._wait_until("pushes that wait for others", lambda: self._tasks.all_started, set)
            self._marked = step
            self._send(self._state.mark_step(self._at.step_mark, step))

    def send_common_mark(self, step: int) -> int | None:
        """Mark the checkpoint of `step` for all workers, of which each has sent its pushes up to that step.

        Returns:
            A ticket for `wait_for_separation`, which has to be called; None: this worker has marked it before.
        """
        with self._lock:
            if self._closed or step <= self._marked:
                return None
            self._marked, ticket = step, self._internal_ticket()
            self._send(self._state.mark_step(self._at.step_mark, step, ticket, common=True))
            return ticket

    @property
    def last_sequence(self) -> int:
        """The sequence of the newest update."""
        return self._state.last_sequence

    @property
    def doing(self) -> str:
        """A description of the clock that the store waits for, for progress output; "" when it waits for none."""
        behind = self._state.lagging_shards()
        return f"waiting for {self._waits.describe(self._state.leaders_of(behind))}" if behind else ""

    # ---- fast path for single keys -------------------------------------------------------------------------------

    def _push_one(self, key: str | int, value: Value | None, callback: Callback | None) -> Ticket | None:
        with self._lock:
            kind = self._single_kind(key)
            if kind is None or value is None:
                return None
            self._check(writes=True)
            self._prefetched.clear()
            if self._state.outstanding.bytes_in_flight >= MOST_IN_FLIGHT:
                self._wait_for_space()
            lanes = given.single_row(kind, key, value)
            ticket = self._ticket(("push", key), callback)
            self._tasks.add_started(ticket)
            outs = self._state.push_one(
                kind, 0 if isinstance(key, str) else key, lanes, ticket.number, self._at.step_mark
            )
            self._send_now(outs)
        self._run_callbacks()
        return ticket

    def _fetch_one(self, key: str | int, callback: Callback | None) -> Ticket | None:
        with self._lock:
            kind = self._single_kind(key)
            if kind is None or kind.reduction.extra == "index":
                return None
            self._check()
            ticket = self._ticket(("pull", key), callback)
            self._tasks.add_started(ticket)
            outs = self._state.read_one(kind, 0 if isinstance(key, str) else key, ticket.number)
            self._send_now(outs)
        self._run_callbacks()
        return ticket

    def _send_now(self, outs: Sequence[ToServer]) -> None:
        if outs:
            self._send(outs)
        if self._state.finished:
            self._finish_tickets()

    def _single_kind(self, key: str | int) -> TableKind | None:
        """Return the kind of a key that the fast path serves; None: the general path is used."""
        if key == "":  # the empty name denotes the table of integer keys
            return None
        kind = self._state.kinds.get(key if isinstance(key, str) else "")
        fits = kind is not None and kind.batchable and (isinstance(key, str) or LEAST <= key <= MOST)
        return kind if fits and self._tasks.delay is None else None

    # ---- inside: any keys -----------------------------------------------------------------------------------------

    def _take_prefetched(self, key: Key | Sequence[str]) -> Result:
        """Return the rows of a key that were requested before, when they have arrived; None: they were not."""
        keys = None if given.is_group(key) else given.checked_key(key)
        with self._lock:
            self._check()
            early = self._prefetched.take(keys, self._state.clock) if isinstance(keys, np.ndarray) else None
            if early is None:
                return None
            self._wait_internal("prefetched rows", early.ticket)
            assert not isinstance(early.read.wants[0], WantedSums), "rows are prefetched"
            rows = given.result_of(early.kind, early.keys, result(early.read.wants[0])[1])
        self._run_callbacks()
        return rows

    def _push(
        self,
        items: Sequence[tuple[CheckedKey, Value, TableKind]],
        what: Literal["push", "start"],
        description: str,
        after: Sequence[Ticket],
        callback: Callback | None,
    ) -> Ticket:
        parts: list[tuple[TableKind, KeyRoute, Lanes]] = []
        for key, value, kind in items:
            route = self._route(kind, key)
            lanes = given.rows_of(kind, key, value, len(route.unique if route.inverse is None else route.inverse))
            if route.inverse is not None:
                _, lanes = merged(kind.reduction, [(route.unique[route.inverse], lanes)], fold=True)
            parts.append((kind, route, lanes))
            if kind.workers_apply:  # rows that are requested already may lack this push
                self._prefetched.clear()
        ticket = self._ticket(description, callback)
        changes = self._state.prepare_push(parts, ticket.number, what, self._at.step_mark)
        self._tasks.add(ticket, after, lambda: self._send_changes(changes))
        self._finish_tickets()
        return ticket

    def _route(self, kind: TableKind, key: CheckedKey) -> KeyRoute:
        if isinstance(key, str):
            return self._state.routes.route_of_name(kind.spec)
        keys = given.integer_keys([key] if isinstance(key, int) else key)
        given.check_bytes(kind.spec, len(keys))
        return self._state.routes.route_of("", keys)

    def _kind_for_push(self, key: CheckedKey, value: Value, reduce: str | UserFunction | None) -> TableKind:
        asked = given.checked_function(reduce, "reduce") if reduce is not None else None
        kind = self._find_kind(key)
        if kind is None:
            return self._make_kind(given.inferred_spec(key, value, asked or "sum"))
        if asked is not None and asked != kind.spec.reduce:
            raise UsageError(
                f"reduce={asked!r} for {given.describe_key(key)}, whose reduction is {kind.spec.reduce}",
                "a key keeps its reduction: use another name, or another store",
            )
        return kind

    def _kind_for_pull(self, key: CheckedKey) -> TableKind:
        kind = self._find_kind(key)
        if kind is None:
            what = f"key {given.describe_key(key)}" if key != "" else "integer keys"
            raise UsageError(
                f"{what}: it was neither pushed nor declared in store {self.name!r}",
                "declare it on every rank (store.declare)",
            )
        return kind

    def _find_kind(self, key: CheckedKey) -> TableKind | None:
        """Return the kind of a key; None when neither this worker nor the servers have it."""
        name = key if isinstance(key, str) else ""
        if name not in self._state.kinds:
            self._describe(name)
        return self._state.kinds.get(name)

    def _describe(self, name: str) -> None:
        ticket = self._internal_ticket()
        self._send(self._state.request_description(name, ticket))
        self._wait_internal(f"the description of {name!r}" if name else "the description of integer keys", ticket)

    def _make_kind(self, spec: TableSpec) -> TableKind:
        new = spec.name not in self._state.kinds
        kind = self._state.resolve_kind(spec)
        if new:
            self._functions.check(spec.reduce, kind.dtype, spec.width)
        return kind

    def _read(
        self, read: TableRead, parts: Sequence[tuple[CheckedKey, TableKind]], group: Sequence[CheckedKey] | None
    ) -> Result:
        found = []
        for want, (key, kind) in zip(read.wants, parts, strict=True):
            assert not isinstance(want, WantedSums), "`pull_sums` reads them"
            keys, lanes = result(want)
            rows = given.result_of(kind, key, lanes)
            found.append((torch.from_numpy(keys.copy()), rows) if isinstance(key, range) else rows)
        return dict(zip(group, found, strict=True)) if group is not None else found[0]

    def _send_changes(self, changes: Sequence[TableChange]) -> None:
        for change in changes:
            self._send(self._state.send_change(change, self._at.step_mark))

    def _send(self, outs: Sequence[ToServer]) -> None:
        for out in outs:
            self._servers.send(self.name, out.server, out.message, out.payload)

    def _ticket(self, what: str | tuple[str, str | int], callback: Callback | None) -> Ticket:
        self._numbers += 1
        ticket = Ticket(self._numbers, what, self._wait_ticket)
        return ticket.then(callback) if callback is not None else ticket

    def _internal_ticket(self) -> int:
        self._internal += 1
        return self._internal

    # ---- inside: waiting; under the lock -------------------------------------------------------------------------

    def _wait_ticket(self, ticket: Ticket, timeout: float | None) -> Result:
        with self._lock:
            shards = lambda: self._state.shards_waited_for(ticket.number)  # noqa: E731
            self._wait_until(ticket.what, lambda: ticket.done, shards, timeout)
        self._run_callbacks()
        return ticket.result

    def _wait_internal(self, what: str, ticket: int) -> None:
        self._wait_until(what, lambda: ticket in self._internal_finished, lambda: self._state.shards_waited_for(ticket))
        self._internal_finished.remove(ticket)

    def _wait_for_space(self) -> None:
        self._wait_until(
            "space for a push", lambda: self._state.outstanding.bytes_in_flight < MOST_IN_FLIGHT, self._all_shards
        )

    def _wait_until(
        self, what: str, done: Callable[[], bool], shards: Callable[[], set[int]], timeout: float | None = None
    ) -> None:
        if not done():
            self._send(self._state.flush())
            servers = lambda: self._state.leaders_of(shards())  # noqa: E731
            self._waits.until(what, servers, lambda server: self._send([self._state.wait_query(server)]), done, timeout)

    def _all_shards(self) -> set[int]:
        return set(range(self._spec.shards))

    # ---- inside: messages of servers -----------------------------------------------------------------------------

    def start_session(self, server: int, attach: Callable[[], None]) -> None:
        """Attach a new connection to a server and start a session on it."""
        with self._lock:
            attach()
            self._send(self._state.start_session(server, self._marked))

    def on_message(
        self, server: int, peer: PeerConnection | None, message: TableFromServer, payload: memoryview
    ) -> None:
        """Process a whole message of a server and run the callbacks of the tickets that it finishes."""
        with self._lock:
            self._send(self._state.on_server_message(server, message, payload))
            self._finish_tickets()
            self._waits.on_message(server, peer)
        self._run_callbacks()

    def _finish_tickets(self) -> None:
        """Finish completed tickets and start the tasks that depend on them; called under the lock."""
        self._tasks.start_ready()
        state = self._state
        while state.finished:
            done, state.finished = state.finished, []
            for number in done:
                if number >= INTERNAL:
                    self._internal_finished.add(number)
                    continue
                ticket = self._tasks.remove(number)
                if number in state.rows:
                    result: Result = state.rows.pop(number).clone()
                else:
                    made = self._results.pop(number, None)
                    result = made() if made is not None else None
                if ticket is not None:
                    self._callbacks += ticket.finish(result)
            self._tasks.start_ready()

    def _check(self, *, writes: bool = False) -> None:
        if self._closed:
            raise UsageError(f"store {self.name!r} is closed", "open it again with run.store()")
        self._waits.raise_if_refused()
        if writes and self.rank not in self._spec.group:
            raise UsageError(
                f"worker/{self.rank} is not in the group of store {self.name!r} and cannot push to it",
                "pull only, or open the store with a group that has this rank",
            )

    def _run_callbacks(self) -> None:
        """Call the callbacks of finished tickets; called without the lock."""
        while self._callbacks:
            self._callbacks.pop(0)()
