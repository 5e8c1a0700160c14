"""Mutated messages about tables are refused by one error of the protocol, or read; no other worker is affected."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from psctl.errors import ProtocolError
from tests.fuzz import table_machines


@pytest.mark.parametrize(
    ("run", "inputs", "count"),
    [
        (table_machines.run_server, table_machines.to_server, 600),
        (table_machines.run_worker, table_machines.to_worker, 2000),
        pytest.param(table_machines.run_server, table_machines.to_server, 30_000, marks=pytest.mark.soak),
        pytest.param(table_machines.run_worker, table_machines.to_worker, 100_000, marks=pytest.mark.soak),
    ],
    ids=["server", "worker", "server, many", "worker, many"],
)
def test_mutated_messages_are_refused_or_read(
    run: Callable[[bytes], None], inputs: Callable[[], Iterable[bytes]], count: int
) -> None:
    valid, seen = list(inputs()), Counter[str]()
    for data in valid:
        run(data)
    for seed in range(count):
        numbers = random.Random(seed)
        data = table_machines.mutated(numbers.choice(valid), numbers)
        try:
            run(data)
            seen["read"] += 1
        except ProtocolError:
            seen["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {seed}: {data!r}") from error
    assert min(seen["read"], seen["refused"]) > count / 10
