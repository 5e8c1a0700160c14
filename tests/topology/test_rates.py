"""Nominal figures against what their sources give, worked out by hand."""

from __future__ import annotations

import pytest

from psctl.topology import rates


@pytest.mark.parametrize(
    ("speed", "width", "gigabytes"),
    [(2.5, 16, 4.0), (5, 16, 8.0), (8, 16, 15.754), (16, 16, 31.508), (32, 16, 63.015), (64, 16, 118.0), (8, 4, 3.938),
     (16, 8, 15.754), (None, None, 16.0), (None, 4, 4.0), (8, None, 15.754)],
)  # fmt: skip
def test_a_slot_carries_its_lanes_less_the_coding(speed: float | None, width: int | None, gigabytes: float) -> None:
    assert rates.pcie(speed, width) / 1e9 == pytest.approx(gigabytes, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "raw", "gigabytes"),
    [("Tesla P100-SXM2-16GB", None, 20), ("Tesla V100-SXM2-32GB", 25.781e9, 25), ("NVIDIA A100-SXM4-80GB", None, 25),
     ("NVIDIA A800-SXM4-80GB", None, 25), ("NVIDIA H100 80GB HBM3", 26.562e9, 25), ("NVIDIA H800", 26.562e9, 25),
     ("NVIDIA GeForce RTX 3090", 14.062e9, 14.0625), ("NVIDIA RTX A6000", None, 14.0625), ("NVIDIA A40", None, 14.0625),
     ("NVIDIA B200", None, 50), ("NVIDIA GB200", None, 50), ("", None, 25), ("", 14.062e9, 14.0625),
     ("", 25.781e9, 25), ("", 26.562e9, 25), ("", 19.531e9, 20), ("", 53.125e9, 50), ("Something New", 40e9, 40)],
)  # fmt: skip
def test_an_nvlink_by_the_name_of_its_gpu_or_the_raw_rate(name: str, raw: float | None, gigabytes: float) -> None:
    assert rates.nvlink(name, raw) == gigabytes * 1e9


def test_a_t4_or_a4000_is_not_taken_for_another_card() -> None:
    assert rates.nvlink("NVIDIA A4000") == rates.FIGURES["NVLink"].value
    assert rates.nvlink("Quadro RTX 8000") == 25e9


def test_networks_lose_what_their_headers_take() -> None:
    assert rates.ethernet(12.5e9) == pytest.approx(11.95e9)
    assert rates.infiniband(25e9) == pytest.approx(24.84e9, rel=1e-3)  # HDR names the rate behind its coding
    assert rates.infiniband(5e9) == pytest.approx(4e9, rel=0.01)  # QDR before it: 8b/10b
    assert rates.infiniband(7e9) == pytest.approx(6.77e9, rel=1e-3)  # FDR: 54.5 of 56 Gbit/s


@pytest.mark.parametrize(
    ("processor", "figure"),
    [("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", "QPI"), ("Intel(R) Xeon(R) Gold 6226R CPU", "UPI"),
     ("Intel(R) Xeon(R) Platinum 8480C", "UPI 2"), ("AMD EPYC 7282 16-Core Processor", "Infinity Fabric 2"),
     ("AMD EPYC 7551 32-Core Processor", "Infinity Fabric"), ("AMD EPYC 9654 96-Core Processor", "Infinity Fabric 3"),
     ("POWER9, altivec supported", "SMP"), ("", "SMP")],
)  # fmt: skip
def test_what_joins_processors_by_their_name(processor: str, figure: str) -> None:
    assert rates.smp(processor) == rates.FIGURES[figure].value


def test_links_of_amd_and_of_one_package() -> None:
    assert [rates.xgmi(name) for name in ("AMD Instinct MI100", "AMD Instinct MI250X", "AMD Instinct MI300X", "")] == [
        46e9, 50e9, 64e9, 50e9,
    ]  # fmt: skip
    assert rates.coherent("NVIDIA GH200 480GB") == 450e9
    assert rates.coherent("NVIDIA GB10") == 300e9
    assert rates.coherent("NVIDIA H200") is None


def test_every_figure_names_its_source_and_is_a_number_that_can_be() -> None:
    for name, figure in rates.FIGURES.items():
        assert len(figure.source) > 10, name
        assert figure.value > 0, name
        assert figure.assumed or "unknown" not in figure.source, f"{name} is assumed and must say so"
