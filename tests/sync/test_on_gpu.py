"""On a real GPU, where there is one: what is staged has the device's bits, and training gives what the CPU gives."""

from __future__ import annotations

import mmap
import time

import pytest
import torch
from torch import nn

from psctl.client.model_layout import describe
from psctl.clock import SystemClock
from psctl.sync.allreduce_sync import AllReduceSync
from psctl.sync.bucket_allreduce import gpu_of
from psctl.sync.device_copies import CopySpan, CudaCopies
from psctl.sync.flat_parameters import FlatParameters, ServerReducer
from psctl.sync.gpu_staging import GpuParameters, Staging
from psctl.sync.ps_sync import ParameterServerSync
from psctl.sync.synchronizer import ExampleWeight
from tests.helpers.ps_world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def shared(count: int) -> torch.Tensor:
    """Return floats in memory that another process could map."""
    return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)


def test_bytes_staged_are_the_devices_whatever_it_does_next() -> None:
    chance = torch.Generator(device="cuda").manual_seed(1)
    staging = Staging(CudaCopies())
    hosts = [staging.lock(shared(1 << 22)) for _ in range(2)]
    for turn in range(40):
        source = torch.randn(2048, 2048, device="cuda", generator=chance) / 45
        result = source
        for _ in range(5):  # the copies are begun long before these are done
            result = result @ source
        strided = result.t() if turn % 2 else result
        staging.copy_to_host([CopySpan(strided, 0, hosts[turn % 2])])
        arrived: list[bool] = []
        staging.run_after_copies(lambda arrived=arrived: arrived.append(True))
        wanted = strided.reshape(-1).clone()
        del strided, result
        torch.randn(2048, 2048, device="cuda", generator=chance)  # takes what was given back
        staging.settle()
        assert arrived
        assert torch.equal(hosts[turn % 2].view(torch.int32), wanted.cpu().view(torch.int32))
        back = torch.full((2048, 2048), float("nan"), device="cuda")
        staging.copy_to_devices([CopySpan(back, 0, hosts[turn % 2])])
        seen = back.reshape(-1).clone()
        staging.wait_for_device_copies()
        assert torch.equal(seen, wanted)
    staging.close()


def test_a_copy_does_not_block_the_thread_that_starts_it() -> None:
    staging = Staging(CudaCopies())
    host = staging.lock(shared(1 << 26))
    source = torch.randn(8192, 8192, device="cuda")
    staging.copy_to_host([CopySpan(source @ source, 0, host)])  # the first call loads libraries
    staging.settle()
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = source @ source @ source
    staging.copy_to_host([CopySpan(result, 0, host)])
    staging.run_after_copies(lambda: None)
    launched = time.perf_counter() - began
    staging.settle()
    assert launched < (time.perf_counter() - began) / 4
    staging.close()


def train(update: str, device: str) -> list[torch.Tensor]:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for one in net.parameters():
            one.uniform_(-0.2, 0.2, generator=chance)
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    layout, parameters = describe(net, optimizer), list(net.parameters())
    trainable, weight = dict(net.named_parameters()), ExampleWeight(1)
    with World(layout, servers=2, update=update, target=4096) as world:
        rest = layout, world.decision.shards, parameters
        client, flat = world.clients[0], FlatParameters(*rest)
        if device == "cuda":
            flat = GpuParameters(Staging(CudaCopies()), False, *rest)
        client.start(flat.values())
        if update == "server":
            synchronizer = ParameterServerSync(net, list(trainable), optimizer, client, flat, weight)
        else:
            synchronizer = AllReduceSync("ps", trainable, ServerReducer(client, flat), weight, SystemClock())
        for _ in range(30):
            optimizer.zero_grad()
            x = torch.rand(16, 1, 8, 8, generator=chance)
            net(x.to(device)).logsumexp(1).mean().backward()
            synchronizer.step(optimizer.step, False)
        synchronizer.wait_exact()
        found = [one.detach().cpu().clone() for one in parameters]
        synchronizer.close("done", failed=False)
    return found


@pytest.mark.parametrize("update", ["server", "worker"])
def test_training_gives_what_the_cpu_gives(update: str) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for one, other in zip(train(update, "cuda"), train(update, "cpu"), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_gpu_has_a_name() -> None:
    assert len(gpu_of(torch.device("cuda:0"))) > 8
