"""`run.store()` as a script uses it: in one process, and over breaking in-memory connections."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from psctl.client.shared_buffers import SharedRows
from psctl.errors import JobFailed, TimedOut, UsageError
from psctl.job.table_server_messages import TablesAssigned, TablesAt
from psctl.kv import tickets
from psctl.kv.open_store import Stores, staleness_of
from psctl.kv.store import Store
from psctl.kv.store_connections import LocalServer, RemoteServers
from psctl.process.user_functions import JobFunctions, name_of
from psctl.ps.permits import TABLES
from psctl.server.table_connections import TableConnections
from psctl.types import Assignment, Member, ServerAt
from tests.helpers.credentials import credentials
from tests.helpers.memory_stream import MemoryNetwork

SHARDS = 8


class Nowhere:
    """A run without steps."""

    step_mark = last_boundary = 0
    keeps_states = False

    def settle(self) -> bool:
        return False


def alone(**options) -> Store:
    return Stores(0, 1, LocalServer, Nowhere()).open(
        options.pop("name", "default"), options.pop("consistency", "asp"), options.pop("reads", "lazy"), None
    )


class Net:
    """Servers' tables and workers' stores over in-memory streams."""

    def __init__(
        self, workers: int, servers: int = 2, consistency="asp", reads="lazy", group=None, replicas=0, host=None
    ) -> None:
        self.host, self.memories = host, []
        self.network = MemoryNetwork()
        members = [Member("server", rank) for rank in range(servers)]
        self.servers = [TableConnections(member, self.dial(member), memory=self.memory(member)) for member in members]
        self.acceptors = [
            self.network.acceptor(credentials(member), TABLES, connections)
            for member, connections in zip(members, self.servers, strict=True)
        ]
        self.at = [ServerAt(rank, 0, each.address) for rank, each in enumerate(self.acceptors)]
        self.chains = [[(shard + more) % servers for more in range(replicas + 1)] for shard in range(SHARDS)]
        found = Assignment(0, self.chains, [[] for _ in self.chains], self.at)
        for server in self.servers:
            server.assign(TablesAssigned(found, begins=True))
        self.links: list[RemoteServers] = []
        self.all = [Stores(rank, workers, lambda rank=rank: self.link(rank), Nowhere()) for rank in range(workers)]
        self.stores = [stores.open("s", consistency, reads, group) for stores in self.all]

    def link(self, rank: int) -> RemoteServers:
        me = Member("worker", rank)
        self.links.append(RemoteServers(TablesAt(self.at, SHARDS), self.dial(me), memory=self.memory(me)))
        return self.links[-1]

    def memory(self, member: Member) -> SharedRows | None:
        if self.host is not None:
            self.memories.append(SharedRows(self.host.segments(member)))
        return self.memories[-1] if self.host is not None else None

    def dial(self, member: Member):
        me = credentials(member)
        return lambda member, address, handler: self.network.dial(address, me, member, TABLES, handler)

    def lose(self, server: int) -> None:
        """End a server; the next one of each chain becomes primary."""
        lost, self.servers[server] = self.servers[server], None
        self.acceptors[server].close()
        lost.close("killed")
        self.at = [at for at in self.at if at.rank != server]
        chains = [[rank for rank in chain if rank != server] for chain in self.chains]
        found = Assignment(1, chains, [[] for _ in chains], self.at)
        for other in self.servers:
            if other is not None:
                other.assign(TablesAssigned(found))
        for links in self.links:
            links.assign(TablesAt(self.at, SHARDS, 1))

    def run(self, script) -> list:
        """Call `script(store)` for each worker in a thread of its own."""
        found, errors = [None] * len(self.stores), []

        def work(rank: int) -> None:
            try:
                found[rank] = script(self.stores[rank])
            except BaseException as error:  # noqa: BLE001  raised below, on the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        if errors:
            raise errors[0]
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.run(lambda store: self.all[store.rank].close(failed=False))
        for server in self.servers:
            if server is not None:
                server.close("over")
        for acceptor in self.acceptors:
            acceptor.close()


# ---- keys and values -----------------------------------------------------------------------------------------------


def test_names_have_tensors_of_any_shape() -> None:
    store = alone()
    large = torch.arange(3 * 70_000, dtype=torch.float32).view(3, 70_000)
    store.push({"a": torch.ones(2, 3), "large": large, "number": 4.0})
    store.push("large", large).wait()
    found = store.pull(["a", "large", "number"])
    assert found["a"].tolist() == [[1.0] * 3] * 2
    assert torch.equal(found["large"], 2 * large)
    assert found["number"].shape == ()


def test_integer_keys_return_rows_in_the_requested_order() -> None:
    store = alone()
    store.push([5, -(2**62), 5], torch.tensor([[1.0], [2.0], [10.0]]))
    assert store.pull(torch.tensor([-(2**62), 7, 5, 5])).flatten().tolist() == [2.0, 0.0, 11.0, 11.0]
    assert store.pull(5).tolist() == [11.0]
    keys, rows = store.pull(range(100))
    assert keys.tolist() == [5]
    assert rows.tolist() == [[11.0]]
    store.push(np.arange(3), 1.0)
    assert store.pull(range(3))[1].flatten().tolist() == [1.0] * 3


def test_a_range_returns_existing_keys_in_its_order() -> None:
    store = alone()
    store.push(range(10), torch.arange(10.0).view(10, 1))
    for keys in (range(0, 10, 2), range(9, -1, -3), range(-7, 30, 5), range(5, 5), range(5, 0), range(0, 2**70, 2**69)):
        found, rows = store.pull(keys)
        assert found.tolist() == [key for key in keys[:20] if 0 <= key < 10]
        assert rows.flatten().tolist() == found.tolist()
    ends = [-(2**63), 2**63 - 1]
    store.push(range(ends[0], 2**63, 2**64 - 1), 1.0)
    assert store.pull(range(ends[0], 2**63, 2**64 - 1))[0].tolist() == ends
    assert store.pull(range(2**63 - 1, ends[0] - 1, -(2**62)))[0].tolist() == [ends[1]]


def test_stepped_ranges_over_servers_include_own_unapplied_pushes() -> None:
    def script(store: Store) -> None:
        store.push(range(store.rank, 30, 3), 1.0 + store.rank)
        store.clock()
        store.push(range(0, 60, 4), 10.0)
        keys, rows = store.pull(range(59, -1, -2))
        there = [key for key in range(59, -1, -2) if key < 30 or key % 4 == 0]
        assert keys.tolist() == there
        expected = [(1.0 + key % 3) * (key < 30) + 10.0 * (key % 4 == 0) for key in there]
        assert rows.flatten().tolist() == expected
        store.clock()

    with Net(3, consistency="bsp") as net:
        net.run(script)


def test_single_integers_of_every_library_are_equal_keys() -> None:
    store = alone()
    store.push(3, torch.ones(2))
    for key in (np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        store.push(key, torch.ones(2)).wait()
        assert store.pull(key).shape == (2,)
    assert store.pull(3).tolist() == [5.0, 5.0]
    every_second = torch.arange(7)[::2]
    store.push(every_second, torch.ones(2, 4).t())  # neither lies as a row of memory
    assert store.pull(np.array([6, 3, 0])[::-1]).tolist() == [[1.0, 1.0], [5.0, 5.0], [1.0, 1.0]]
    store.push("w", torch.ones(3))
    store.push("w", (1j * torch.ones(3)).conj().imag)  # torch keeps that as memory with a sign to be turned
    assert store.pull("w").tolist() == [0.0] * 3


def test_a_pushed_value_may_be_changed_immediately() -> None:
    store = alone(consistency="bsp")
    value = torch.ones(3)
    store.push("w", value)
    value.zero_()
    assert store.pull("w").tolist() == [1.0] * 3
    store.pull("w").zero_()
    assert store.pull("w").tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda store: store.pull("w"), "neither pushed nor declared"),
        (lambda store: store.pull([1.5]), "keys are a list of float"),
        (lambda store: store.pull(1 << 63), "64 bits with sign"),
        (lambda store: store.pull([1 << 64]), "64 bits with sign|keys are object"),
        (lambda store: store.push([(1 << 64) - 1], torch.ones(1, 3)), "a key does not fit in 64 bits"),
        (lambda store: store.push("v", torch.ones(4)), r"\(4,\) is pushed.*\(3,\)"),
        (lambda store: store.push("v", torch.ones(3, dtype=torch.float64)), "float64 is pushed"),
        (lambda store: store.push("v", torch.ones(3), reduce="max"), "whose reduction is sum"),
        (lambda store: store.push("u", torch.ones(3), reduce="most"), "no reduction"),
        (lambda store: store.push("u", torch.ones(3, dtype=torch.int64), reduce="mean"), "mean"),
        (lambda store: store.push("u", torch.ones(3), reduce=lambda a, b: a), "top of a module|in the script"),
        (lambda store: store.declare("u"), "without a value"),
        (lambda store: store.clock(), "no clocks"),
        (lambda store: store.call("nowhere:nothing", "v"), "nowhere"),
        (lambda store: store.pull(("v", range(3))), "a tuple of range and str"),
        (lambda store: store.pull([[1], [2, 3]]), "a list of list"),
        (lambda store: store.pull(torch.tensor(3.0)), "keys are float32"),
        (lambda store: store.pull(torch.tensor([1, 2]).to_sparse()), "keys: a tensor of layout sparse"),
        (lambda store: store.pull(torch.tensor([1], device="meta")), "keys: .* meta"),
        (lambda store: store.pull(True), "is a bool"),
        (lambda store: store.pull(""), "name is ''"),
        (lambda store: store.push("", torch.ones(3)), "a key's name is ''"),
        (lambda store: store.push("x\ud800", 1.0), "no valid Unicode"),
        (lambda store: store.push("x" * 1001, 1.0), "1001 bytes, the most are 1000"),
        (lambda store: store.push(range(10**10), 1.0), "10000000000 integer keys in one call, the most are 67108864"),
        (lambda store: store.push(range(10**30), 1.0), "1000000000000000000000000000000 integer keys"),
        (lambda store: store.push(torch.zeros(1, dtype=torch.int64).expand(10**10), 1.0), "integer keys in one call"),
        (lambda store: store.push("x", torch.ones(1).expand(10**13)), "37252 GiB, the most of one call are 16 GiB"),
        (lambda store: store.declare("x", shape=(10**7, 10**7)), "the most of one call are 16 GiB"),
        (lambda store: store.push("x", torch.ones(3).to_sparse()), "layout sparse"),
        (lambda store: store.push("v", torch.ones(3).to_sparse()), "a value: a tensor of layout sparse"),
        (lambda store: store.push("x", torch.ones(3, device="meta")), "meta"),
        (lambda store: store.push("x", np.ones(3, dtype=np.uint32)), "does not accept uint32"),
        (lambda store: store.push("x", torch.ones(3, dtype=torch.float8_e4m3fn)), "does not accept float8"),
        (lambda store: store.push({"x": torch.ones(3)}, torch.ones(3)), "a separate value"),
        (lambda store: store.push("x", (torch.ones(3), torch.ones(3)), reduce="argmin"), "indices of float32"),
        (lambda store: store.push("v", torch.ones(3), after=[3]), r"after=\[3\]"),
        (lambda store: store.push("v", torch.ones(3), callback=3), "callback=3 is no function"),
        (lambda store: store.push("v", torch.ones(3), reduce=3), "reduce=3"),
        (lambda store: store.wait(None), "wait for None"),
        (lambda store: store.wait([3]), "wait for"),
        (lambda store: store.wait([], timeout=-1), "timeout=-1"),
        (lambda store: store.declare("x", shape=(-1,)), "is no shape"),
        (lambda store: store.declare("x", shape=(2.5,)), "2.5.* is no shape"),
        (lambda store: store.declare("x", shape=(2,), dtype=np.float32), "no dtype of torch"),
        (lambda store: store.declare("x", shape=(2,), initial=[1, 2]), "initial=list"),
        (lambda store: store.declare("x", shape=(2,), initial=1.5, dtype=torch.int64), "initial=1.5"),
        (lambda store: store.declare("x", shape=(2,), apply=3), "apply=3"),
        (lambda store: store.call("operator:add", "v", other=torch.ones(1)), "other=tensor"),
        (lambda store: store.key(3), r"store.key\(3\)"),
        (lambda store: setattr(store, "delay", 1.5), "a delay of 1.5"),
    ],
)
def test_invalid_calls_are_refused_with_the_reason(wrong, text: str) -> None:
    store = alone()
    store.push("v", torch.ones(3))
    with pytest.raises(UsageError, match=text):
        wrong(store)
    assert store.pull("v").tolist() == [1.0] * 3


def test_store_options_are_checked() -> None:
    assert [staleness_of(each) for each in ("asp", "bsp", {"ssp": 3})] == [None, 0, 3]
    for wrong in ("ssp", {"ssp": -1}, {"ssp": True}, 4, np.array(["asp"])):
        with pytest.raises(UsageError, match="consistency"):
            staleness_of(wrong)
    stores = Stores(0, 1, LocalServer, Nowhere())
    assert stores.open("a", "bsp", "eager", None) is stores.open("a", "bsp", "eager", [0])
    groups = [1], "ab", 3, [0.0], [True], []
    for arguments in (("a", "asp", "lazy", None), ("b", "asp", "eager", None), (3, "asp", "lazy", None),
                      *(("b", "bsp", "lazy", group) for group in groups)):  # fmt: skip
        with pytest.raises(UsageError, match="store"):
            stores.open(*arguments)


# ---- functions -----------------------------------------------------------------------------------------------------


def test_a_function_is_sent_by_name_or_refused() -> None:
    assert name_of(torch.testing.make_tensor).endswith(":make_tensor")
    assert name_of("rules:best") == "rules:best"

    def closure(one, other):
        return one

    for wrong in (closure, lambda a, b: a, max):
        with pytest.raises(UsageError):
            name_of(wrong)


def test_a_user_reduction_is_checked_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules_here.py").write_text(
        "import torch\n"
        "def hypot(a, b): return (a * a + b * b).sqrt()\n"
        "def minus(a, b): return a - b\n"
        "def widest(a, b): return torch.where(a.abs() >= b.abs(), a, b)\n"
        "def sgd(held, pushed): return held - 0.1 * pushed\n"
        "def start(keys, width): return keys[:, None].float().expand(-1, width)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    store = alone()
    store.push("h", torch.tensor([3.0]), reduce="rules_here:hypot")
    store.push("h", torch.tensor([4.0]))
    assert store.pull("h").item() == pytest.approx(5.0)
    with pytest.raises(UsageError, match=r"not commutative"):
        store.push("m", torch.tensor([3.0]), reduce="rules_here:minus")
    with pytest.raises(UsageError, match=r"not commutative"):  # of -1 and 1 the first that came
        store.push("x", torch.tensor([-1.0, 1.0]).long(), reduce="rules_here:widest")
    store.declare("w", torch.ones(2), apply="rules_here:sgd")
    store.push("w", torch.tensor([1.0, 2.0]))
    assert store.pull("w").tolist() == pytest.approx([0.9, 0.8])
    store.declare(int, shape=(2,), initial="rules_here:start")
    assert store.pull([3, 4]).tolist() == [[3.0, 3.0], [4.0, 4.0]]
    with pytest.raises(UsageError, match="servers do not run the script"):
        JobFunctions().function("__main__:thing")


# ---- tickets -------------------------------------------------------------------------------------------------------


def test_a_task_starts_after_its_dependencies_and_the_delay_can_change() -> None:
    begun: list[int] = []
    tasks = tickets.Tasks()
    made = [tickets.Ticket(number, "task", lambda *_: None) for number in range(6)]

    def finish(number: int) -> None:
        tasks.remove(number).finish(None)
        tasks.start_ready()

    tasks.delay = 1
    for ticket in made:
        after = [made[0]] if ticket.number == 1 else []
        tasks.add(ticket, after, lambda number=ticket.number: begun.append(number))
        tasks.start_ready()
    assert begun == [0]  # 1 depends on 0, and with a delay of 1 task 2 waits for 0 as well
    finish(0)
    assert begun == [0, 1, 2]
    tasks.delay = None
    tasks.start_ready()
    assert begun == [0, 1, 2, 3, 4, 5]
    assert tasks.oldest is made[1]
    assert tasks.all_started


def test_callbacks_run_and_dependencies_are_respected() -> None:
    store, received = alone(), []
    first = store.push("w", torch.ones(2), callback=received.append)
    second = store.fetch("w", after=[first], callback=received.append)
    assert store.wait([first, second])[1].tolist() == [1.0, 1.0]
    second.then(lambda value: received.append("late"))
    assert received[0] is None
    assert received[1].tolist() == [1.0, 1.0]
    assert received[2] == "late"
    store.delay = 0
    assert store.delay == 0
    store.push("w", torch.ones(2))
    assert store.pull("w").tolist() == [2.0, 2.0]
    with pytest.raises(UsageError, match="delay"):
        store.delay = -1


# ---- over connections ----------------------------------------------------------------------------------------------


def test_workers_read_each_others_pushes() -> None:
    keys = torch.arange(0, 5000, 3)

    def script(store: Store):
        store.declare("w", torch.full((100_000,), 0.5))
        store.push("w", torch.full((100_000,), float(store.rank)))
        for _ in range(3):
            store.push(keys, torch.ones(len(keys), 8))
        store.clock()
        return store.pull("w"), store.pull(keys), store.pull(range(10))

    with Net(3, consistency="bsp", reads="eager") as net:
        for w, rows, (found, _) in net.run(script):
            assert (w == 3.5).all()
            assert (rows == 9).all()
            assert found.tolist() == [0, 3, 6, 9]


def test_broken_connections_apply_each_push_exactly_once() -> None:
    with Net(2) as net:

        def script(store: Store):
            for turn in range(40):
                store.push({"w": torch.ones(3)})
                store.push(torch.arange(50), torch.ones(50, 2))
                if turn % 10 == 5:
                    for server in range(2):
                        net.network.link(Member("worker", store.rank), Member("server", server)).kill()
                if turn % 13 == 0:
                    assert (store.pull("w") >= turn + 1).all()
            store.flush()

        net.run(script)
        assert net.stores[0].pull("w").tolist() == [80.0] * 3
        assert (net.stores[1].pull(range(50))[1] == 80).all()


def test_a_lost_server_loses_no_update_with_replicas() -> None:
    with Net(2, servers=3, replicas=1) as net:

        def script(store: Store):
            for turn in range(40):
                store.push({"w": torch.ones(3)})
                store.push(torch.arange(50), torch.ones(50, 2))
                if (turn, store.rank) == (20, 0):
                    net.lose(1)
                if turn % 13 == 0:
                    assert (store.pull("w") >= turn + 1).all()
            store.flush()

        net.run(script)
        assert net.stores[0].pull("w").tolist() == [80.0] * 3
        assert (net.stores[1].pull(range(50))[1] == 80).all()


def test_a_timeout_names_the_slow_worker() -> None:
    with Net(2, consistency={"ssp": 0}) as net:
        fast = net.stores[0]
        thread = threading.Thread(target=fast.clock)
        thread.start()
        with fast._lock:
            fast._wait_until(
                "an answer", lambda: fast._state.wait_reasons == {0: [1], 1: [1]}, fast._state.lagging_shards, 20
            )
        assert "worker/1" in fast.doing
        net.stores[1].clock()
        thread.join(20)
        assert not thread.is_alive()
        with pytest.raises(TimedOut, match="did not finish"), fast._lock:
            fast._wait_until("nothing", lambda: False, set, 0.01)


def test_a_waiting_thread_wakes_only_when_its_wait_has_ended() -> None:
    with Net(1, servers=2) as net:
        store = net.stores[0]
        names = [str(number) for number in range(64)]
        store.push(dict.fromkeys(names, torch.ones(2)))
        store.pull(names)
        woken, wait = [], store._waits.changed.wait

        def counted(left: float) -> bool:
            woken.append(wait(left))
            return woken[-1]

        store._waits.changed.wait = counted
        turns = 20
        for _ in range(turns):
            store.push(dict.fromkeys(names, torch.ones(2)))
            store.pull(names)  # two servers answer, and send Done before
        assert len(woken) <= turns
        assert all(woken)


def test_a_rank_outside_the_group_only_pulls() -> None:
    with Net(2, consistency="bsp", group=[0]) as net:
        net.stores[0].push("w", torch.ones(2))
        net.stores[0].clock()
        assert net.stores[1].pull("w").tolist() == [1.0, 1.0]
        with pytest.raises(UsageError, match="cannot push to it"):
            net.stores[1].push("w", torch.ones(2))


def test_the_server_reports_conflicting_declarations() -> None:
    with Net(2, servers=1) as net:
        net.stores[0].push("w", torch.ones(2)).wait()
        net.stores[1].declare("w", shape=(3,))
        with pytest.raises(JobFailed, match="shape"):
            net.stores[1].push("w", torch.ones(3)).wait()
        for stores in net.all:
            stores.close(failed=True)


def test_hundreds_of_single_keys_are_sent_in_few_messages() -> None:
    with Net(1) as net:
        store = net.stores[0]
        store.declare(int, shape=(4,))
        sent = []
        for links in net.links:
            send = links.send
            links.send = lambda *message, send=send: (sent.append(message), send(*message))[1]
        rows = torch.arange(1200.0).view(300, 4)
        called = []
        tickets = [store.push(key % 100, row, callback=called.append) for key, row in enumerate(rows)]
        store.wait(tickets)
        found = [store.fetch(key) for key in range(100)]
        values = store.wait(found)
        assert called == [None] * 300
        assert torch.equal(torch.stack(values), rows.view(3, 100, 4).sum(0))
        assert len(sent) < 100, "400 pushes and reads"
        assert all(value.untyped_storage().nbytes() == 16 for value in values), "a result keeps no other's memory"
        row = torch.ones(4, requires_grad=True)
        store.push(7, row)
        with pytest.raises(UsageError, match="is pushed to integer keys"):
            store.push(7, torch.ones(5))
        with pytest.raises(UsageError, match="64 bits with sign"):
            store.push(1 << 64, torch.ones(4))
        assert torch.equal(store.pull(7), rows.view(3, 100, 4).sum(0)[7] + 1)


def test_a_single_push_arrives_without_a_wait() -> None:
    with Net(1) as net:
        store = net.stores[0]
        tickets = [store.push("w", torch.ones(3)) for _ in range(50)]
        deadline = time.monotonic() + 20
        while not all(ticket.done for ticket in tickets) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert all(ticket.done for ticket in tickets)
        assert store.pull("w").tolist() == [50] * 3


def test_a_table_with_an_optimizer_and_limits_from_a_script() -> None:
    net = Net(2, consistency="bsp")
    for store in net.stores:
        store.declare(
            int, shape=(2,), optimizer={"name": "sgd", "lr": 1.0}, initial={"uniform": 0.5, "seed": 1},
            admit={"count": 2}, expire=8, capacity="1MB",
        )  # fmt: skip
    started = net.stores[0].pull([1, 2])
    assert torch.equal(net.stores[1].pull([1, 2]), started)
    together(net, lambda store: (store.push([1, 2], torch.ones(2, 2)), store.clock()))
    assert torch.equal(net.stores[0].pull([1, 2]), started)  # not admitted yet
    together(net, lambda store: (store.push([1], torch.ones(1, 2)), store.configure(int, lr=0.25), store.clock()))
    assert torch.equal(net.stores[1].pull([1, 2]), started - torch.tensor([[0.5], [0.0]]))
    stats = net.stores[0].stats()
    assert (stats["keys"], stats["admitted"], stats["refused"], stats["pushed"]) == (1, 1, 2, 3)
    assert stats["read_hit_rate"] > 0.0
    with pytest.raises(UsageError, match="no setting 'eps'"):
        net.stores[0].configure(int, eps=1.0)
    with pytest.raises(UsageError, match="initial is"):
        net.stores[0].declare(int, shape=(2,))


def together(net: Net, act) -> None:
    threads = [threading.Thread(target=act, args=(store,)) for store in net.stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": {"lr": 1.0}}, "optimizer="),
        ({"optimizer": {"name": "sgd", "lr": "fast"}}, "lr='fast'"),
        ({"optimizer": "sgd"}, "without lr"),
        ({"initial": {"normal": -1.0}}, "initial="),
        ({"initial": {"normal": 1.0, "uniform": 1.0}}, "initial="),
        ({"initial": {"normal": 1.0}, "dtype": torch.int64}, "int64"),
        ({"admit": {"count": 0}}, "admit="),
        ({"admit": {"counts": 2}}, "admit="),
        ({"admit": {"probability": 2.0}}, "admit="),
        ({"expire": 0}, "expire=0"),
        ({"expire": 3}, "asp"),
        ({"capacity": "1 furlong"}, "capacity="),
        ({"capacity": -1}, "capacity="),
    ],
)
def test_wrong_declarations_of_rows_are_refused(more, words) -> None:
    with pytest.raises(UsageError, match=words):
        alone().declare(int, shape=(2,), **more)
