"""What doctor says of a host's GPUs and of the torch that is to use them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psctl.launch.setup.doctor import HostReport, check_gpus, newer_driver


@pytest.mark.parametrize(
    ("driver", "cuda", "needed"),
    [
        ("580.159.03", "13.0", None), ("575.57.08", "13.0", 580), ("535.129.03", "12.8", None),
        ("470.256.02", "12.1", 525), ("470.256.02", "11.8", None), ("", "13.0", None), ("580.65.06", None, None),
        ("300.1", "99.0", None),
    ],
)  # fmt: skip
def test_a_driver_older_than_torchs_cuda_is_found(driver, cuda, needed) -> None:
    assert newer_driver(driver, cuda) == needed


@pytest.mark.parametrize(
    ("torch", "cuda", "driver", "says"),
    [
        ("2.11.0", "13.0", "580.159.03", "torch is built for 13.0"),
        (
            "2.11.0",
            "13.0",
            "550.90.07",
            "torch is built for CUDA 13.0, which needs driver 580 or newer: it sees no GPU",
        ),
        ("2.11.0", None, "580.159.03", "torch 2.11.0 is a CPU build, the GPUs idle"),
    ],
)
def test_torch_and_driver_are_held_against_each_other(torch, cuda, driver, says) -> None:
    gpu = SimpleNamespace(driver=driver, name="NVIDIA H200")
    site = SimpleNamespace(facts=SimpleNamespace(findings=(), gpus=[gpu]), modules={"torch": torch}, cuda=cuda)
    report = HostReport("h0")
    check_gpus(report, site)
    assert [check.detail for check in report.checks if check.check == "cuda"] == [says]
