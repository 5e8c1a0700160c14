"""Client and server over in-memory connections: waits, faults, and the threads that read."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from msgspec.structs import replace

from psctl.client.dense_client import ParameterClient
from psctl.clock import SystemClock
from psctl.errors import PeerLost, PsctlError, TimedOut
from psctl.job.membership_messages import ProtocolViolation
from psctl.job.training_messages import Heartbeat, Join, Leave, MemberReady
from psctl.ps import permits
from psctl.ps.messages import Forwarded, Leads, Push, PutRankState, StartValues
from psctl.ps.outputs import SaveSlices
from psctl.ps.snapshot import CopiedSlice
from psctl.server.main import Server, stream_save
from psctl.types import Address, Member, ServerAt, TensorSlice
from tests.helpers.credentials import credentials
from tests.helpers.ps_world import World, flat_values, make_layout
from tests.helpers.running import until

PARAMETERS = [((70,), "float32", 0), ((30,), "float32", 0)]
VALUES = [torch.ones(70), torch.ones(30)]
GROUPS = [{"lr": 0.5}]
LAYOUT = make_layout(PARAMETERS, "SGD", GROUPS)


def gradients(workers: int, value: float = 1.0):
    return [{0: torch.full((70,), value), 1: torch.full((30,), value)} for _ in range(workers)]


def test_a_wait_names_the_server_and_the_worker_that_it_waits_for(monkeypatch):
    monkeypatch.setattr("psctl.client.server_waits.TICK", 0.02)
    with World(LAYOUT, 2, 1) as world:
        world.start(flat_values(LAYOUT, VALUES))
        early, late = world.clients
        push_all(world, early, 0, 1.0)
        early.step(0, GROUPS)
        early.pull(1)
        waiting = threading.Thread(target=early.wait, args=(1,))
        waiting.start()
        until(lambda: early.activity.endswith("from server/0, which waits for worker/1"))
        push_all(world, late, 0, 3.0)
        late.step(0, GROUPS)
        waiting.join(10)
        assert early.activity == "compute"
        assert early.seconds_waiting > 0
        assert early.landing["float32"].eq(0).all()  # 1 - 0.5 * (1 + 3) / 2


def push_all(world, client, clock: int, value: float) -> None:
    client.send_buffer(clock)["float32"].fill_(value)
    for shard, held in enumerate(world.held):
        client.push(clock, shard, [True] * len(held))


def test_landed_values_are_copied_once_during_a_wait(monkeypatch):
    monkeypatch.setattr("psctl.ps.dense.client.pending_values.LEAST", 64)
    with World(LAYOUT, 2, 2, update="worker", target=64) as world:
        world.start(flat_values(LAYOUT, VALUES))
        early, late = world.clients
        copied, some = [], threading.Event()

        def take(shard, values, present, clocks) -> bool:
            assert values.eq(2.0).all()
            copied.append(shard)
            some.set()
            return True

        early.deliver(take)
        push_all(world, early, 0, 1.0)
        early.pull(1)
        waiting = threading.Thread(target=early.wait, args=(1,))
        waiting.start()
        late.send_buffer(0)["float32"].fill_(3.0)
        shards = range(len(world.decision.shards))
        for shard in shards[: len(shards) // 2]:
            late.push(0, shard, [True] * len(world.held[shard]))
        assert some.wait(10)
        assert waiting.is_alive()
        for shard in shards[len(shards) // 2 :]:
            late.push(0, shard, [True] * len(world.held[shard]))
        waiting.join(10)
        assert sorted(copied) == list(shards)


def test_a_slow_worker_does_not_end_a_wait_at_any_patience(monkeypatch):
    monkeypatch.setattr("psctl.client.server_waits.TICK", 0.02)
    with World(LAYOUT, 2, 1, patience=0.3) as world:
        world.start(flat_values(LAYOUT, VALUES))
        early, late = world.clients
        push_all(world, early, 0, 1.0)
        early.step(0, GROUPS)
        early.pull(1)
        waiting = threading.Thread(target=early.wait, args=(1,))
        waiting.start()
        began = SystemClock().now()
        until(lambda: SystemClock().now() - began > 1.0)
        assert waiting.is_alive()
        push_all(world, late, 0, 1.0)
        late.step(0, GROUPS)
        waiting.join(10)
        assert early.landing["float32"].eq(0.5).all()


def test_a_timeout_names_the_server_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("psctl.client.server_waits.TICK", 0.02)

    class Mute:
        """Receives everything and never answers."""

        on_connected = on_message = on_connection_lost = staticmethod(lambda *_: None)
        receive_buffer_for = staticmethod(lambda *_: None)

    with World(LAYOUT, 1, 1) as world:
        acceptor = world.network.acceptor(credentials(Member("server", 0)), permits.PARAMETERS, Mute())
        mute = Member("server", 0)
        mute_at = replace(world.assignment, servers=[ServerAt(0, 0, acceptor.address)])
        decision = replace(world.decision, assignment=mute_at)
        client = ParameterClient(Member("worker", 0), 1, decision, world.dialler(0), SystemClock(), patience=0.2)
        with pytest.raises(TimedOut, match=rf"{mute} at memory:2 has sent nothing"):
            client.start(flat_values(LAYOUT, VALUES))
        client.close("given up")
        acceptor.close()


@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_a_broken_connection_is_made_again_without_loss(fault):
    with World(LAYOUT, 1, 2, target=280, silence=0.2) as world:
        world.start(flat_values(LAYOUT, VALUES))
        (client,) = world.clients
        push_all(world, client, 0, 1.0)
        getattr(world.network.link(Member("worker", 0), Member("server", 1)), fault)()
        client.step(0, GROUPS)
        client.pull(1)
        client.wait(1)
        assert client.landing["float32"].eq(0.5).all()


class Watcher:
    """The handler of a worker's connection that a test makes."""

    def __init__(self) -> None:
        self.ended: list[PsctlError] = []

    on_connected = on_message = staticmethod(lambda *_: None)
    receive_buffer_for = staticmethod(lambda *_: None)

    def on_connection_lost(self, peer, error) -> None:
        self.ended.append(error)


@pytest.mark.parametrize(
    ("message", "payload", "reason"),
    [
        (Push(0, 0, 1.0, b"\1", 0), bytes(4000), "4000 bytes where"),
        (Push(99, 0, 1.0, b"\1", 0), bytes(280), "shard 99, of which there are 2"),
    ],
)
def test_an_invalid_push_ends_its_connection_with_the_reason_and_changes_no_value(message, payload, reason):
    with World(LAYOUT, 2, 1, target=280) as world:
        world.start(flat_values(LAYOUT, VALUES))
        honest, other = world.clients
        push_all(world, honest, 0, 1.0)
        honest.step(0, GROUPS)
        other.close()
        watcher = Watcher()
        bad = world.dialler(1)(Member("server", 0), world.decision.assignment.servers[0].address, watcher)
        bad.send(message, payload)
        until(lambda: watcher.ended)
        assert reason in watcher.ended[0].message
        again = ParameterClient(Member("worker", 1), 2, world.decision, world.dialler(1), SystemClock(), 20.0)
        again.start(None)
        push_all(world, again, 0, 3.0)
        again.step(0, GROUPS)
        honest.pull(1)
        honest.wait(1)
        assert honest.landing["float32"].eq(0).all()
        again.close()


def test_the_front_changes_only_in_waits_and_only_in_the_awaited_shards():
    with World(LAYOUT, 1, 2, target=280) as world:
        world.start(flat_values(LAYOUT, VALUES))
        (client,) = world.clients
        push_all(world, client, 0, 1.0)
        client.step(0, GROUPS)
        client.pull(1)
        until(lambda: client.seconds_in_flight > 0)  # all have arrived
        assert client.landing["float32"].eq(1).all()
        client.wait(1, [1])
        assert client.landing["float32"].tolist() == [1.0] * 70 + [0.5] * 30
        client.wait(1, [0])
        assert client.landing["float32"].eq(0.5).all()


def test_the_client_reports_each_push_whose_bytes_were_sent():
    sent: list[tuple[int, int]] = []
    with World(LAYOUT, 1, 1, target=280, trace=lambda shard, clock: sent.append((shard, clock))) as world:
        world.start(flat_values(LAYOUT, VALUES))
        world.push(0, gradients(1))
        world.step(0, GROUPS)
    assert sent == [(1, 0), (0, 0)]


def test_two_send_buffers_alternate():
    with World(LAYOUT, 1, 1) as world:
        world.start(flat_values(LAYOUT, VALUES))
        (client,) = world.clients
        seen = []
        for clock in range(4):
            seen.append(client.send_buffer(clock)["float32"].data_ptr())
            world.push(clock, gradients(1))
            world.step(clock, GROUPS)
        assert seen[0] == seen[2] != seen[1] == seen[3]
        assert sum(map(sum, client.bytes_by_peer.values())) > 4 * 2 * 400


def test_an_early_worker_waits_until_the_server_has_its_shards():
    with World(LAYOUT, 1, 1, decided=False) as world:
        starting = threading.Thread(target=world.start, args=(flat_values(LAYOUT, VALUES),))
        starting.start()
        until(lambda: world.server_link(0).of(MemberReady))
        assert starting.is_alive()
        world.decide()
        starting.join(10)
        assert world.clients[0].landing["float32"].eq(1).all()


def test_a_server_registers_with_its_address_and_sends_heartbeats():
    with World(LAYOUT, 1, 1) as world:
        sent = world.server_link(0)
        until(lambda: sent.of(Heartbeat) and sent.of(MemberReady))
        assert [type(message) for message in sent.sent if not isinstance(message, Heartbeat)][:2] == [Join, MemberReady]
        assert sent.of(MemberReady)[0].address == world.decision.assignment.servers[0].address


def test_a_server_exits_with_0_on_leave_and_with_1_after_loss_of_the_coordinator():
    class Nobody:
        send = flush = staticmethod(lambda *_, **__: None)

    for act, status in (
        (lambda server: server.on_message(None, Leave("done"), None), 0),
        (lambda server: server.on_connection_lost(None, PeerLost("gone")), 1),
    ):
        server = Server(Member("server", 0))
        act(server)
        assert server.run(Nobody(), Address("memory", 1)) == status


def test_an_unreadable_checkpoint_ends_the_server_with_the_reason(capfd):
    whole = TensorSlice("param/layer.0", "float32", (70,), 0, 70), bytearray(280)
    other = TensorSlice("param/layer.1", "float32", (30,), 0, 30), bytearray(120)
    checkpoint = {"param/layer.0": whole, "param/layer.1": other}
    with World(LAYOUT, 0, 1, checkpoint=checkpoint, step=3, load_problem="a.safetensors is torn") as world:
        world.join_servers()
    assert world.job.statuses == [1]
    assert "job-1@3: a.safetensors is torn" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("shape", "reason"), [((71,), r"has shape \(71,\), the model's has \(70,\)"), (None, "holds no parameter layer.0")]
)
def test_a_checkpoint_of_another_model_ends_the_server_with_the_difference(shape, reason, capfd):
    checkpoint = {"param/layer.1": (TensorSlice("param/layer.1", "float32", (30,), 0, 30), bytearray(120))}
    if shape:
        checkpoint["param/layer.0"] = TensorSlice("param/layer.0", "float32", shape, 0, 71), bytearray(284)
    with World(LAYOUT, 0, 1, checkpoint=checkpoint, step=3) as world:
        world.join_servers()
    assert world.job.statuses == [1]
    assert re.search(reason, capfd.readouterr().err)


def test_a_checkpoint_part_is_sent_in_bounded_messages_with_flow_control():
    class Network:
        def __init__(self) -> None:
            self.sizes: list[int] = []
            self.flushes = 0

        def send(self, message, payload=None, *, urgent=False) -> None:
            self.sizes.append(len(payload or b""))

        def flush(self, timeout=None) -> None:
            self.flushes += 1

    network = Network()
    size = 20 << 20
    slices = [CopiedSlice(TensorSlice("param/a", "float32", (size // 4,), 0, size // 4), memoryview(bytes(size)))]
    stream_save(network, SaveSlices(7, slices))
    assert sum(network.sizes) == size
    assert max(network.sizes) <= 512 * 1024
    assert network.flushes == 2


def readers_of(client) -> list[int]:
    """Record from now on which threads handle the client's messages."""
    seen, machine = [], client._state
    original = machine.on_server_message

    def received(*args, **options):
        seen.append(threading.get_ident())
        return original(*args, **options)

    machine.on_server_message = received
    return seen


def step_once(world, client, clock: int) -> None:
    push_all(world, client, clock, 1.0)
    client.wait(clock + 1)


def test_a_wait_for_one_server_reads_directly_and_the_reader_thread_resumes_later(monkeypatch):
    monkeypatch.setattr(
        "psctl.transport.peer_connection.REST", 60.0
    )  # the reader thread does not look: only a waiting thread can read, or resume it
    with World(LAYOUT, 1, 1, update="worker") as world:
        world.start(flat_values(LAYOUT, VALUES))
        (client,) = world.clients
        seen, me = readers_of(client), threading.get_ident()
        clock = 0
        while me not in seen:  # once the reader has rested
            step_once(world, client, clock)
            clock += 1
            assert clock < 100
        seen.clear()
        for later in range(clock, clock + 20):
            step_once(world, client, later)
        assert set(seen) == {me}
    monkeypatch.setattr("psctl.transport.peer_connection.REST", 0.005)
    with World(LAYOUT, 1, 1, update="worker") as world:
        world.start(flat_values(LAYOUT, VALUES))
        (client,) = world.clients
        for clock in range(5):
            step_once(world, client, clock)
        seen = readers_of(client)
        push_all(world, client, 5, 1.0)
        until(lambda: seen)  # no thread waits
        assert threading.get_ident() not in seen
        client.wait(6)


def test_a_wait_for_several_servers_leaves_reading_to_reader_threads(monkeypatch):
    monkeypatch.setattr("psctl.transport.peer_connection.REST", 60.0)
    with World(LAYOUT, 1, 2, update="worker") as world:
        world.start(flat_values(LAYOUT, VALUES))
        (client,) = world.clients
        by_server = [
            [shard for shard, owner in enumerate(world.decision.assignment.owners) if owner == server]
            for server in (0, 1)
        ]
        assert all(by_server)
        for clock in range(20):
            push_all(world, client, clock, 1.0)
            for shards in by_server if clock % 2 else ():  # one at a time: their readers may rest after it
                client.wait(clock + 1, shards)
            client.wait(clock + 1)


class Forger:
    """The handler of a connection with a worker's certificate that sends messages psctl's own code never sends."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.why = ""

    on_connected = on_message = staticmethod(lambda *_: None)
    receive_buffer_for = staticmethod(lambda *_: None)

    def on_connection_lost(self, peer, error):
        self.why = error.message
        self.gone.set()


FORGED = [
    (StartValues(0), b"\0" * 8, "StartValues is for worker/0 to send"),
    (PutRankState(0, rank=0), b"evil", "PutRankState: the state of worker/0"),
    (Push(0, 0, 1.0, b"", -1, covers=(0,)), None, "Push: a sum of 1 workers without the sender"),
    (Forwarded(0, 1, 1, 1), None, "Forwarded is no message that a worker may send"),
    (Leads(1, [0]), None, "Leads is no message that a worker may send"),
]


@pytest.mark.parametrize(("message", "payload", "why"), FORGED)
def test_a_worker_with_a_forbidden_message_is_refused_and_others_train(message, payload, why):
    with World(LAYOUT, 2, 1) as world:
        world.start(flat_values(LAYOUT, VALUES))
        address = world.decision.assignment.servers[0].address
        before = [value.clone() for value in world.clients[0].landing.values()]
        forger = Forger()
        me = credentials(Member("worker", 1))
        peer = world.network.dial(address, me, Member("server", 0), permits.PARAMETERS, forger)
        peer.send(message, payload)
        assert forger.gone.wait(10)
        assert why in forger.why
        until(lambda: world.server_link(0).of(ProtocolViolation))
        (violation,) = world.server_link(0).of(ProtocolViolation)
        assert violation.member == Member("worker", 1)
        assert why in violation.reason
        for client in world.clients:
            push_all(world, client, 0, 1.0)
        for client in world.clients:
            client.step(0, GROUPS)
            client.pull(1)
        for client in world.clients:
            client.wait(1)
        after = world.clients[0].landing["float32"]
        assert after.eq(0.5).all()
        assert before[0].eq(1).all()
