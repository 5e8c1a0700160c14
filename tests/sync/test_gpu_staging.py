"""Copies between a device and the host, under a device that runs late and in random order: the same bits as without."""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from psctl.client.model_layout import describe
from psctl.clock import SystemClock
from psctl.ps.pieces import pieces
from psctl.ps.shards import cut, spaces
from psctl.sync.allreduce_sync import AllReduceSync
from psctl.sync.device_copies import CopySpan, CudaCopies, CudaEvents
from psctl.sync.flat_parameters import FlatParameters, ServerReducer
from psctl.sync.gpu_staging import GpuParameters, Staging
from psctl.sync.ps_sync import ParameterServerSync
from psctl.sync.synchronizer import ExampleWeight
from psctl.types import NO_PEERS, Layout
from tests.helpers.device import Device, FreedMemoryRead, NeverRecorded, Stream
from tests.helpers.ps_world import World

here = Path(__file__).parent

RATE = 0.125


class OnDevice(CudaCopies):
    """The real ones, on the device of the tests."""

    def __init__(self, device) -> None:
        super().__init__(device.cuda)
        self.device = device

    def holds(self, tensor) -> bool:
        return self.device.home(tensor) is not None


class Client:
    """Stands in for a ParameterClient and its servers: they read and write the client's buffers some time later.

    A second worker is played: its gradient is 1 everywhere at odd clocks.
    """

    base, bytes_by_peer, doing, seconds_waiting, answered_at = 0, NO_PEERS, "", 0.0, 0.0

    def __init__(self, layout: Layout, shards, update: str, chance: random.Random) -> None:
        self._layout, self.shards, self._update, self._random = layout, shards, update, chance
        self.landing, self.residual = self._new(), {}
        self._values = self._new()
        self._send = [self._new(), self._new()]
        self._held = pieces(layout, shards)
        self._network: deque = deque()
        self._sums = self._new()
        self._present: dict[int, dict[int, bool]] = {}
        self._pushed: dict[int, set[int]] = {}
        self._clock = self._stepped = 0
        self._lent: dict[int, torch.Tensor | None] = {}  # the newest values; None: they were taken
        self._read: dict[int, list[torch.Tensor]] = {}

    def _new(self):
        return {dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in spaces(self._layout).items()}

    def _part(self, flat, shard):
        one = self.shards[shard]
        return flat[one.dtype].narrow(0, one.range.start, len(one.range))

    def start(self, values) -> None:
        for dtype, flat in (values or {}).items():
            self._values[dtype].copy_(flat)
            self.landing[dtype].copy_(flat)

    def send_buffer(self, clock):
        return self._send[clock % 2]

    def push(self, clock, shard, present, weight=1.0) -> None:
        assert shard not in self._pushed.setdefault(clock, set()), "pushed once"
        self._pushed[clock].add(shard)
        for values in self._read.pop(shard, ()):  # the push says that they were read: they may be written anew
            values.fill_(float("nan"))
        self._network.append((clock, shard, present))
        if self._random.random() < 0.5:
            self._sum()

    def _sum(self) -> None:
        """Sum what was pushed: it stands in the send buffer."""
        while self._network:
            clock, shard, present = self._network.popleft()
            mine, total = self._part(self._send[clock % 2], shard), self._part(self._sums, shard)
            total.fill_(float(clock % 2))
            for piece, there in zip(self._held[shard], present, strict=True):
                if there:
                    total.narrow(0, piece.at, piece.size).add_(mine.narrow(0, piece.at, piece.size))
                seen = self._present.setdefault(clock, {})
                seen[piece.parameter] = seen.get(piece.parameter, False) or there or clock % 2 == 1

    def step(self, clock, groups, scale=None, save=False) -> None:
        if self._update == "server":
            assert self._pushed.get(clock) == set(range(len(self.shards))), "a step comes after all of its pushes"

    def together(self):
        return nullcontext()

    def pull(self, clock) -> None:
        self._take_in(range(len(self.shards)))
        self._clock = clock
        self._lent.clear()

    def deliver(self, take) -> None:
        self._take = take

    def wait(self, clock, shards=None, *, exact=False) -> None:
        self._sum()
        if self._update == "server" and self._stepped < clock:
            self._stepped = clock
            for shard in range(len(self.shards)):
                self._part(self._values, shard).sub_(RATE * self._part(self._sums, shard))
        self._take_in(range(len(self.shards)) if shards is None else shards)

    def _take_in(self, shards) -> None:
        """Have values taken from where the servers have them."""
        source = self._values if self._update == "server" else self._sums
        for shard in shards if self._clock else ():
            if shard not in self._lent:
                self._lent[shard] = self._part(source, shard).clone()
            elif self._lent[shard] is None:
                continue
            seen = self._present.get(self._clock - 1, {})
            present = bytes(seen.get(piece.parameter, False) for piece in self._held[shard])
            if self._take(shard, self._lent[shard], present, self._clock):
                self._read.setdefault(shard, []).append(self._lent[shard])
                self._lent[shard] = None

    def presence(self, clock):
        return [self._present[clock][place] for place in sorted(self._present[clock])]

    def complete_clocks(self, shards):
        return 1 << 30

    def settle(self) -> None:
        return

    def close(self, reason="") -> None:
        return


class Net(nn.Module):
    """Two branches, one of which a step may leave out; a convolution with strides of its own; a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(5)
        self.eyes = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.left, self.right = nn.Linear(16, 6, bias=False), nn.Linear(16, 6, bias=False)
        self.head = nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            for one in self.parameters():
                one.uniform_(-0.5, 0.5, generator=chance)

    def forward(self, x, side: str):
        seen = self.eyes(x).relu().flatten(1)
        return self.head(getattr(self, side)(seen).tanh())


def train(update, seed, device=None, change=lambda copies, staging, flat: None, connect=None, in_backward=False):
    """Train for some steps; returns what the parameters were in each and after.

    Args:
        change: plants a bug.
        in_backward: some shards are stepped before the others are pushed.
        connect: makes a real client of a layout, which a thread hands pushes to; None: `Client`.
    """
    plan, late = random.Random(seed), random.Random(seed + 1)  # what the script does; when things happen
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    layout, parameters = describe(net, optimizer), list(net.parameters())
    if device is not None:
        for one in parameters:
            device.own(one)
    client = connect(layout) if connect else Client(layout, cut(layout, 2, 256), update, late)
    rest = (layout, cut(layout, 2, 256), parameters)  # parameters are cut, and parameters share a shard
    flat = FlatParameters(*rest)
    if device is not None and connect:
        flat = GpuParameters(Staging(OnDevice(device)), False, *rest)
    elif device is not None:
        copies = OnDevice(device)
        staging = Staging(copies, threaded=False)
        flat = GpuParameters(staging, False, *rest)
        change(copies, staging, flat)
    client.start(flat.values())
    trainable, weight = dict(net.named_parameters()), ExampleWeight(1)
    if update == "server":
        synchronizer = ParameterServerSync(
            net, list(trainable), optimizer, client, flat, weight, in_backward=in_backward
        )
    else:
        synchronizer = AllReduceSync("ps", trainable, ServerReducer(client, flat), weight, SystemClock())
    seen = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=plan.random() < 0.5)
        x = torch.linspace(-1, 1, 5 * 8).reshape(5, 2, 2, 2)
        what = plan.choice(["left", "right", "both", "none", "twice"])
        if device is not None:
            device.own(x)
        loss = net(x, "right" if what in ("right", "both") else "left").square().sum()
        if what in ("both", "twice"):
            with synchronizer.accumulate():
                net(x, "left").square().sum().backward()
        if what != "none" or update == "worker":
            loss.backward()
        if device is not None and not connect and late.random() < 0.5:
            staging.run_next()
        seen += [one.detach().clone() for one in parameters]
        synchronizer.step(optimizer.step, False)
    synchronizer.wait_exact()
    seen += [one.detach().clone() for one in parameters]
    synchronizer.close("done", failed=False)
    if device is not None:
        device.finish()
        assert not device.locked, "the host's memory is let go of"
    return seen


def same(one, other) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def on_device(update: str, seed: int, change=lambda copies, staging, flat: None) -> list[torch.Tensor]:
    with Device(random.Random(seed)) as device:
        return train(update, seed, device, change)


def differs(update: str, seed: int, change) -> bool:
    try:
        return not same(on_device(update, seed, change), train(update, seed))
    except (AssertionError, FreedMemoryRead, NeverRecorded):
        return True


@pytest.mark.parametrize("update", ["server", "worker"])
def test_training_on_a_late_device_has_the_bits_of_training_without_one(update) -> None:
    for seed in range(2):
        assert same(on_device(update, seed), train(update, seed)), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("update", ["server", "worker"])
def test_training_on_a_late_device_has_the_same_bits_whatever_is_late(update) -> None:
    for seed in range(2, 50):
        assert same(on_device(update, seed), train(update, seed)), f"seed {seed}"


@pytest.mark.parametrize(("update", "in_backward"), [("server", False), ("server", True), ("worker", False)])
def test_what_servers_of_this_host_read_is_what_the_device_copied(update, in_backward) -> None:
    """A real client and real servers over shared memory, and the thread that hands pushes on."""
    found = []
    for simulated_device, early in ((None, False), (None, in_backward), (Device(random.Random(4)), in_backward)):
        worlds = []

        def connect(layout, worlds=worlds, early=early):
            worlds.append(World(layout, servers=2, update=update, in_backward=early))
            assert bool(worlds[0].clients[0].shards_in_backward) == early
            return worlds[0].clients[0]

        with simulated_device or nullcontext():
            found.append(train(update, 3, simulated_device, connect=connect, in_backward=early))
        worlds[0].close()
    assert all(same(found[0], other) for other in found[1:])


def not_computed(copies, staging, flat) -> None:
    """Gradients are copied without waiting for the stream that computes them."""

    class Alone(Stream):
        def wait_stream(self, other) -> None:
            return

    copies._cuda.Stream = lambda device: Alone(copies.device)


def not_arrived(copies, staging, flat) -> None:
    """A push leaves before its bytes are on the host."""
    copy = copies.to_host
    copies.to_host = lambda spans: CudaEvents([]) if copy(spans) else None


def not_pushed(copies, staging, flat) -> None:
    """A step is ordered while pushes wait for their bytes."""
    staging.settle = lambda: None


def not_in_order(copies, staging, flat) -> None:
    """Values are written on a stream of their own."""
    copy, other = copies.to_devices, Stream(copies.device)

    def beside(spans):
        with copies.device.cuda.stream(other):
            return copy(spans)

    copies.to_devices = beside


def not_read(copies, staging, flat) -> None:
    """Acknowledge values to servers before they are copied."""
    copy = copies.to_devices
    copies.to_devices = lambda spans: CudaEvents([]) if copy(spans) else None


@pytest.mark.parametrize("bug", [not_computed, not_arrived, not_pushed, not_in_order])
def test_a_planted_bug_shows(bug) -> None:
    assert any(differs("server", seed, bug) for seed in range(20)), bug.__doc__


def two_versions(seed: int, change=lambda copies, staging, flat: None) -> list[float]:
    """Let two versions of the values arrive, of a clock that has no gradient here; returns what each step read."""
    with Device(random.Random(seed)) as device:
        net = nn.Linear(4, 1, bias=False)
        layout, parameters = describe(net, torch.optim.SGD(net.parameters())), [device.own(net.weight)]
        client = Client(layout, cut(layout, 1, 256), "server", random.Random(seed))
        copies = OnDevice(device)
        staging = Staging(copies, threaded=False)
        flat = GpuParameters(staging, False, layout, client.shards, parameters)
        change(copies, staging, flat)
        client.start({"float32": torch.zeros(4)})
        client.deliver(lambda shard, values, present, clocks: flat.read(shard, values, None) or True)
        read = []
        for clock in range(4):
            flat.push(client, clock, 0, 1.0)
            flat.finish_pushes()
            client.step(clock, [])
            flat.finish_reads()
            client.pull(clock + 1)
            flat.finish_reads()
            client.wait(clock + 1)
            read.append(net.weight.detach().sum())
        device.finish()
        return [float(one) for one in read]


def test_values_land_only_where_the_last_ones_were_copied_from() -> None:
    assert all(two_versions(seed) == [0.0, -0.5, -0.5, -1.0] for seed in range(10))
    assert any(two_versions(seed, not_read) != [0.0, -0.5, -0.5, -1.0] for seed in range(10)), not_read.__doc__


def test_memory_that_is_copied_is_held_until_it_is() -> None:
    for seed in range(20):
        with Device(random.Random(seed)) as device:
            copies = OnDevice(device)
            staging, found, bare = Staging(copies, threaded=False), torch.zeros(8), torch.zeros(8)
            source = device.own(torch.arange(8.0))
            staging.copy_to_host([CopySpan(source + 1, 0, found)])  # nobody else holds the sum
            staging.run_after_copies(lambda: None)
            staging.settle()
            assert torch.equal(found, torch.arange(8.0) + 1)
            if seed == 0:  # as it would be if nobody held it
                copies.to_host([CopySpan(source + 2, 0, bare)])
                with pytest.raises(FreedMemoryRead):
                    device.finish()


def test_what_lies_on_the_host_is_copied_at_once_and_the_rest_beside_it() -> None:
    with Device(random.Random(1)) as device:
        staging = Staging(OnDevice(device), threaded=False)
        there, away, found = torch.ones(3), device.own(torch.full((2,), 2.0)), torch.zeros(5)
        staging.copy_to_host([CopySpan(there, 0, found[:3]), CopySpan(away, 0, found[3:])])
        assert found[:3].tolist() == [1, 1, 1]
        staging.run_after_copies(lambda: None)
        staging.settle()
        assert found.tolist() == [1, 1, 1, 2, 2]
        staging.copy_to_devices([CopySpan(there, 0, found[2:]), CopySpan(away, 0, found[:2])])
        assert there.tolist() == [1, 2, 2]
        staging.wait_for_device_copies()
        assert away.clone().sum().item() == 2


def test_what_goes_wrong_where_it_is_handed_on_is_raised_where_the_step_ends() -> None:
    staging, done = Staging(CudaCopies(), threaded=False), []

    def refuse() -> None:
        raise ValueError("refused")

    staging.run_after_copies(lambda: done.append(1))
    staging.run_after_copies(refuse)
    staging.run_after_copies(lambda: done.append(2))
    with pytest.raises(ValueError, match="refused"):
        staging.settle()
    assert done == [1], "nothing leaves after what went wrong"


def test_memory_is_locked_once_and_whole_and_little_is_not() -> None:
    with Device(random.Random(1)) as device:
        staging, much, little = Staging(OnDevice(device), threaded=False), torch.zeros(1 << 16), torch.zeros(1 << 10)
        for part in (much[5:9], much, much[100:], little):
            assert staging.lock(part) is part
        assert device.locked == {much.data_ptr(): much.nbytes}
        staging.close()
        assert not device.locked


def test_memory_that_cannot_be_locked_is_reported_once_and_used(capfd) -> None:
    with Device(random.Random(1)) as device:
        device.refuses = 2
        copies = OnDevice(device)
        copies.lock(torch.zeros(4))
        copies.lock(torch.zeros(4))
        device.cuda._sleep(1)  # the error was taken
        copies.close()
    assert capfd.readouterr().err.count("could not be locked for the GPU (CUDA error 2)") == 1
