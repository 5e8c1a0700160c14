"""A plan's reason says what carries the bytes."""

from __future__ import annotations

import pytest

from psctl.plan.reasons import channel


@pytest.mark.parametrize(
    ("chosen", "hosts", "gpus", "said"),
    [
        ("native", ["a", "b"], False, "; over Gloo, which psctl neither encrypts nor authenticates"),
        ("native", ["a", "a"], False, "; over Gloo, which psctl neither encrypts nor authenticates"),
        ("ring", ["a", "b"], True, "; over NCCL, which psctl neither encrypts nor authenticates"),
        ("native", ["a", "a"], True, ""),
        ("ring", ["a", "a"], False, "; bytes stay in memory that the host's processes share"),
        ("ps", ["a", "a", "a"], True, "; bytes stay in memory that the host's processes share"),
        ("ring", ["a", "b"], False, "; over psctl's own sealed connections"),
        ("ps", ["a", "b", "b"], False, "; over psctl's own sealed connections, within a host in shared memory"),
    ],
)
def test_what_carries_the_bytes(chosen: str, hosts: list[str], gpus: bool, said: str) -> None:
    assert channel(chosen, hosts, gpus=gpus) == said
