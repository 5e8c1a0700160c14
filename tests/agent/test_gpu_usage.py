"""What nvidia-smi prints about GPUs and processes is read, and given to the processes of the job."""

from __future__ import annotations

import threading

import pytest

from psctl.agent.gpu_usage import GPUS, GpuProcess, GpuReading, GpuSampler, ProcessGpus, gpus_in, processes_in, usage_of

MIB = 1 << 20
A, B = "GPU-7d2f1c1e-0a51-9d0c-bb4f-6c1a3f0f8a11", "GPU-11d0b6a5-6f0c-2b7e-8f43-2f9be3a2c0d4"
PRINTED = f"""\
{A}, NVIDIA H100 80GB HBM3, 97, 61234, 81559
{B}, NVIDIA H100 80GB HBM3, 3, 4, 81559
"""
MIG = f"{A}, NVIDIA A100-SXM4-40GB, [N/A], 37, 40960\n"
RUNNING = f"71, {A}, 61200\n72, {B}, 900\n72, {A}, 100\n80, {B}, [N/A]\n"


def test_gpus_are_read():
    assert gpus_in(PRINTED) == [
        GpuReading(A, "NVIDIA H100 80GB HBM3", 97, 61234 * MIB, 81559 * MIB),
        GpuReading(B, "NVIDIA H100 80GB HBM3", 3, 4 * MIB, 81559 * MIB),
    ]
    assert gpus_in(MIG)[0].busy is None, "nvidia-smi does not know it where MIG is on"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that\n",
        f"{A}, NVIDIA H100\n",
        f"{A}, NVIDIA H100, 97, 3, [Unknown Error]\n",
        "\x00\xff,,,,,\n",
    ],
)
def test_other_text_is_of_no_gpu(text):
    assert gpus_in(text) == []


def test_processes_are_read():
    assert processes_in(RUNNING) == [
        GpuProcess(71, A, 61200 * MIB),
        GpuProcess(72, B, 900 * MIB),
        GpuProcess(72, A, 100 * MIB),
        GpuProcess(80, B, 0),
    ]
    assert processes_in("no running processes found\n") == []


def test_a_process_has_the_load_of_its_gpus_and_the_memory_that_it_holds():
    sessions = {71: 70, 72: 72}  # 80 is of another container
    found = usage_of(gpus_in(PRINTED), processes_in(RUNNING), sessions.get)
    assert found == {70: ProcessGpus(97, 61200 * MIB), 72: ProcessGpus(50, 1000 * MIB)}


def test_gpus_are_read_again_and_a_failure_between_keeps_the_reading_before():
    calls, enough = [], threading.Event()

    def run(arguments):
        calls.append(arguments)
        if len(calls) > 6:
            enough.set()
        if arguments != GPUS:
            return RUNNING
        return PRINTED if calls.count(GPUS) == 1 else None

    sampler = GpuSampler(0.001, run)
    sampler.start()
    assert enough.wait(10)
    sampler.end()
    gpus, processes = sampler.newest()
    assert [gpu.uuid for gpu in gpus] == [A, B]
    assert len(processes) == 4


def test_a_host_without_gpus_is_asked_once():
    calls = []
    sampler = GpuSampler(0.001, lambda arguments: calls.append(arguments))
    sampler.start()
    for thread in threading.enumerate():
        if thread.name == "psctl gpus":
            thread.join(10)
    assert calls == [GPUS]
    assert sampler.newest() == ([], [])
