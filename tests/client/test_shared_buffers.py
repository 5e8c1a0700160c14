"""Shared memory between workers and servers of one host: bitwise equal training, and few bytes on the wire."""

from __future__ import annotations

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.messages import Push, SharedMemoryAccepted, SharedMemoryOffer, SharedRange
from psctl.transport.shared_memory import FIRST, PAGE
from psctl.types import Member
from tests.helpers.job_world import Job
from tests.helpers.ps_world import DTYPES, World, flat_values, make_layout
from tests.helpers.threaded_job import LARGEST, Host

_job = Job

SHAPES = [((70, 90), "float32", 0), ((33,), "float64", 0), ((2000,), "float32", 0)]
GROUPS = [{"lr": 0.1, "momentum": 0.5}]
LAYOUT = make_layout(SHAPES, "SGD", GROUPS)
SUMS = make_layout(SHAPES, "", GROUPS)
ONES = [torch.ones(shape, dtype=DTYPES[dtype]) for shape, dtype, _ in SHAPES]
STEPS = 4


def draw(clock: int, rank: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * clock + rank)
    dtypes = DTYPES
    return {
        index: torch.randn(shape, generator=generator, dtype=dtypes[dtype])
        for index, (shape, dtype, _) in enumerate(SHAPES)
    }


def trained(update: str, near, staleness=0) -> tuple[list[torch.Tensor], list[int]]:
    """Train; return the last values of each rank, and the bytes that each moved."""
    with World(LAYOUT if update == "server" else SUMS, 2, 2, update, 6000, near=near, staleness=staleness) as world:
        world.start(flat_values(LAYOUT, ONES))
        before = [sum(map(sum, client.bytes_by_peer.values())) for client in world.clients]
        for clock in range(STEPS):
            world.push(clock, [draw(clock, 0), draw(clock, 1)])
            world.step(clock, GROUPS if update == "server" else [])
        for client in world.clients if staleness else ():
            client.wait(STEPS, exact=True)
        found = [world.parameter(rank, index).clone() for rank in range(2) for index in range(len(SHAPES))]
        return found, [
            sum(map(sum, client.bytes_by_peer.values())) - was
            for client, was in zip(world.clients, before, strict=True)
        ]


@pytest.mark.parametrize("update", ["server", "worker"])
def test_shared_memory_gives_bitwise_equal_training_and_only_other_hosts_move_bytes(update):
    sent, far = trained(update, lambda member: False)
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent) // 2
    assert all(moved > 2 * STEPS * size for moved in far)
    shared, close = trained(update, lambda member: True)
    assert all(moved < 0.2 * min(far) for moved in close)
    mixed, some = trained(update, lambda member: member in (Member("worker", 0), Member("server", 1)))
    assert some[0] < 0.9 * some[1]
    for one, two, three in zip(sent, shared, mixed, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_staleness_works_with_shared_memory():
    sent, _ = trained("server", lambda member: False, staleness=2)
    shared, _ = trained("server", lambda member: True, staleness=2)
    for one, two in zip(sent, shared, strict=True):
        assert torch.equal(one, two)


def test_a_reconnected_worker_shares_memory_again():
    with World(LAYOUT, 1, 1, target=6000) as world:
        world.start(flat_values(LAYOUT, ONES))
        moved = []
        for clock in range(200):
            before = sum(map(sum, world.clients[0].bytes_by_peer.values()))
            world.push(clock, [draw(clock, 0)])
            if clock == 1:
                world.network.link(Member("worker", 0), Member("server", 0)).kill()
            world.step(clock, GROUPS)
            moved.append(sum(map(sum, world.clients[0].bytes_by_peer.values())) - before)
            if max(moved) > 30_000 and moved[-1] < 10_000:
                return  # bytes were sent for a while, and are shared again
        raise AssertionError(moved)


def script(run):
    """Train a model whose first parameter is cut, one block without a gradient in some steps, none held by the last."""
    generator = torch.Generator().manual_seed(3)  # torch's own is everyone's: the workers are threads here
    net = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3)))
    with torch.no_grad():
        for one in net.parameters():
            one.normal_(std=0.1, generator=generator)
    net[1].weight = torch.nn.Parameter(net[1].weight.detach().t().contiguous().t())  # strides of its own
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + run.rank))
        blocks = [model[0], model[2]] if step % 2 else [model[0], model[1], model[2]]
        for block in blocks:
            x = block(x)
        with run.accumulate():
            x.square().mean().backward(retain_graph=True)
        x.sum().backward()
        gradients = [None if one.grad is None else one.grad.clone() for one in net.parameters()]
        optimizer.step()
    run.wait()
    return [one.detach().clone() for one in net.parameters()], gradients


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_prepared_model_trains_bitwise_equal_with_servers_on_the_same_host(update):
    sent = _job(2, 2, update=update, target=2000).run(script)
    host = Host()
    shared = _job(2, 2, update=update, target=2000, host=host).run(script)
    host.close()
    for (values, gradients), (others, theirs) in zip(sent, shared, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
        assert all(
            one is other is None or torch.equal(one, other) for one, other in zip(gradients, theirs, strict=True)
        )


# ---- one process's end ----


class Peer:
    """Stands in for a connection: keeps the messages that are sent."""

    def __init__(self, member: Member) -> None:
        self.member, self.sent = member, []

    def send(self, message) -> None:
        self.sent.append(message)


@pytest.fixture
def ends():
    host = Host()
    yield host.sharing(Member("worker", 0)), host.sharing(Member("server", 0))
    host.close()


def meet(worker, server) -> tuple[Peer, Peer]:
    """Exchange offer and acceptance; return both connections."""
    to_server, to_worker = Peer(Member("server", 0)), Peer(Member("worker", 0))
    worker.offer(to_server)
    for message in to_server.sent:
        server.find_shared_bytes(to_worker, message)
    for message in to_worker.sent:
        worker.find_shared_bytes(to_server, message)
    return to_server, to_worker


def test_a_process_reads_the_shared_buffer_of_another_in_place(ends):
    worker, server = ends
    buffer = worker.zeros(1000, torch.float32)
    assert worker.place_for(0, buffer) is None, "no process of this host is connected yet"
    to_server, to_worker = meet(worker, server)
    assert (to_server.sent, to_worker.sent) == ([SharedMemoryOffer(0)], [SharedMemoryAccepted()])
    at = worker.place_for(0, buffer[100:200])
    assert at == SharedRange(0, 400, 400)
    buffer.copy_(torch.arange(1000))
    found = server.find_shared_bytes(to_worker, Push(0, 0, 1.0, b"\1", 0, at))
    assert torch.equal(torch.frombuffer(found, dtype=torch.float32), torch.arange(100.0, 200.0))
    assert server.find_shared_bytes(to_worker, Push(0, 0, 1.0, b"\1", 0)) is None
    assert worker.place_for(0, torch.zeros(3)) is None, "it is not in shared memory"
    assert worker.place_for(1, buffer) is None, "server/1 is not near"


@pytest.mark.parametrize(
    "at",
    [
        SharedRange(0, FIRST, 4),
        SharedRange(0, -4, 4),
        SharedRange(0, 0, FIRST + 1),
        SharedRange(1, 0, 4),
        SharedRange(-1, 0, 4),
    ],
)
def test_invalid_places_are_protocol_errors(ends, at):
    worker, server = ends
    worker.zeros(10, torch.float32)
    _, to_worker = meet(worker, server)
    with pytest.raises(ProtocolError, match="worker/0"):
        server.find_shared_bytes(to_worker, Push(0, 0, 1.0, b"\1", 0, at))


def test_no_memory_is_shared_before_an_accepted_offer(ends):
    worker, server = ends
    worker.zeros(10, torch.float32)
    stranger = Peer(Member("worker", 0))
    with pytest.raises(ProtocolError, match="not on this host"):
        server.find_shared_bytes(stranger, Push(0, 0, 1.0, b"\1", 0, SharedRange(0, 0, 4)))
    server.find_shared_bytes(stranger, SharedMemoryOffer(5))
    server.find_shared_bytes(Peer(Member("worker", 0, incarnation=1)), SharedMemoryOffer(0))
    assert server.place_for(0, server.zeros(10, torch.float32)) is None


def test_a_disconnected_process_shares_nothing_and_mapped_bytes_stay_readable(ends):
    worker, server = ends
    buffer = worker.zeros(10, torch.float32)
    _, to_worker = meet(worker, server)
    push = Push(0, 0, 1.0, b"\1", 0, worker.place_for(0, buffer))
    found = server.find_shared_bytes(to_worker, push)
    server.forget(Member("worker", 0))
    buffer.fill_(7.0)
    assert torch.frombuffer(found, dtype=torch.float32).eq(7).all()
    with pytest.raises(ProtocolError, match="not on this host"):
        server.find_shared_bytes(to_worker, push)
    assert server.place_for(0, server.zeros(4, torch.float32)) is None


def test_buffers_beyond_a_segment_use_further_segments(ends):
    worker, server = ends
    buffers = [worker.zeros(FIRST // 8 - 1, torch.float32) for _ in range(5)]
    _, to_worker = meet(worker, server)
    places = [worker.place_for(0, buffer) for buffer in buffers]
    assert [at.segment for at in places] == [0, 0, 1, 1, 1]
    assert all(at.offset % PAGE == 0 for at in places)
    for value, (buffer, at) in enumerate(zip(buffers, places, strict=True)):
        buffer[:10] = value
        found = server.find_shared_bytes(to_worker, Push(0, 0, 1.0, b"\1", 0, at))
        assert torch.frombuffer(found, dtype=torch.float32)[:10].eq(value).all()


def test_a_process_without_shared_memory_allocates_private_buffers(ends):
    worker, server = ends
    buffer = worker.zeros(LARGEST + 1, torch.uint8)
    assert buffer.numel() == LARGEST + 1
    assert worker.zeros(0, torch.float32).numel() == 0
    to_server, _ = meet(worker, server)
    assert to_server.sent == [], "it has no segment to offer"
