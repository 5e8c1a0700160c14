"""psctl store on the user's machine: answers put together, batches, and every refusal in a sentence."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from typing import Any

import msgspec
import pytest

from psctl import errors
from psctl.job.table_server_messages import ReadRow, ReadRows, ReadTable
from psctl.launch.home import HostRecord, JobRecord, KnownCluster
from psctl.launch.jobs.store_query import BATCH, MOST, StoreReader, batches
from psctl.remote.shell import CommandResult
from tests.helpers.fake_shell import FakeShell
from tests.helpers.manual_clock import ManualClock

RECORD = JobRecord(
    job="words-1", name="words", created=1.0, cluster=KnownCluster("lab", "", "", 0.0),
    hosts=[HostRecord("a", "/w", "/w/jobs/words-1/a", "python3", "/w/code/1")], job_file="", job_source="",
    job_folder="", code_hash="", checkpoints="",
)  # fmt: skip
ROWS = ReadTable("", (2,), "float32", "sum")
W = ReadTable("w", (3,), "bfloat16", "sum")


def answer(led: list[int], rows: list[ReadRow], values: list[float], problem: str = "", epoch: int = 0) -> Any:
    """What one server of a job with two shards says, as the agent hands it on."""
    told = ReadRows(1, 0, epoch, 2, led, ["default"], [ROWS, W], rows, problem)
    return {**msgspec.to_builtins(told), "payload": b64encode(array("f", values).tobytes()).decode()}


class Host:
    """A head whose agent gives these answers, one a question; the last one for ever."""

    def __init__(self, *said: Any) -> None:
        self.said, self.asked = list(said), []  # type: ignore[var-annotated]
        self.shell, self.clock = FakeShell(), ManualClock()
        self.shell.on("env", self._call)

    def _call(self, words: Any, stdin: bytes) -> CommandResult:
        assert words[-2] == "read"
        self.asked.append(json.loads(words[-1]))
        found = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        return CommandResult("error" in found, json.dumps(found).encode(), b"")

    def read(self, *keys: str | int, store: str = "default") -> Any:
        return StoreReader(self.shell, RECORD, store, self.clock).read(keys)


def both(*answers: Any) -> Any:
    return {"servers": len(answers), "answers": list(answers)}


def test_rows_of_several_servers_and_blocks_of_a_tensor_are_put_together() -> None:
    one = answer([0], [ReadRow("", [5], 2, "float32"), ReadRow("w", [1], 2, "float32")], [1, 2, 9, 0])
    two = answer([1], [ReadRow("", [3], 2, "float32"), ReadRow("w", [0], 2, "float32")], [3, 4, 7, 8])
    host = Host(both(one, two))
    found = host.read("w", 3, 4, 5, 3)
    assert [(entry.key, entry.value) for entry in found.entries] == [
        ("w", [7, 8, 9]), (3, [3, 4]), (4, None), (5, [1, 2]),
    ]  # fmt: skip
    assert host.asked == [{"store": "default", "names": ["w"], "keys": [3, 4, 5]}]


def test_without_keys_tables_are_listed() -> None:
    found = Host(both(answer([0, 1], [], []))).read()
    assert (found.stores, [table.name for table in found.tables], found.entries) == (["default"], ["", "w"], [])


def test_of_two_that_claim_a_shard_the_newer_assignment_holds() -> None:
    row = [ReadRow("", [5], 2, "float32")]
    new, old = answer([0, 1], row, [1, 1], epoch=7), answer([0], row, [2, 2], epoch=6)
    assert Host(both(new, old)).read(5).entries[0].value == [1, 1]


def test_while_shards_move_or_a_server_is_busy_the_request_is_repeated() -> None:
    moving, busy = both(answer([0], [], [])), both(answer([], [], [], "busy"), answer([1], [], []))
    silent = {"servers": 2, "answers": [answer([0], [], [])]}
    host = Host(moving, busy, silent, both(answer([0, 1], [], [])))
    assert host.read(5).entries[0].value is None
    assert (len(host.asked), host.clock.now()) == (4, 1.5)
    with pytest.raises(errors.TimedOut, match="shards are moving"):
        Host(moving).read(5)


def test_what_is_too_long_is_requested_in_halves() -> None:
    large = both(answer([0, 1], [], [], "large"))
    rows = both(answer([0, 1], [ReadRow("", [1], 2, "float32")], [1, 2]))
    host = Host(large, rows, rows)
    assert [entry.value for entry in host.read(1, 2).entries] == [[1, 2], None]
    assert [asked["keys"] for asked in host.asked] == [[1, 2], [1], [2]]
    with pytest.raises(errors.UsageError, match="key 'w' of store 'default' has more bytes"):
        Host(large).read("w")


@pytest.mark.parametrize(
    ("said", "key", "store", "message"),
    [
        (both(answer([0, 1], [], [])), "x", "default", "store 'default' of words-1 has no key 'x'"),
        (both(answer([0, 1], [], [])), "w", "other", "words-1 has no store 'other'; it has: default"),
        (both(), "w", "default", "words-1 has no store 'default'; it has: none yet"),
    ],
)
def test_what_is_not_there_is_reported_in_a_sentence(said: Any, key: str, store: str, message: str) -> None:
    with pytest.raises(errors.UsageError, match=message) as told:
        Host(said).read(key, store=store)
    assert told.value.hint


def test_names_alone_have_no_rows_of_integers() -> None:
    told = answer([0, 1], [], [])
    told["tables"] = told["tables"][1:]
    with pytest.raises(errors.UsageError, match="no rows of integer keys"):
        Host(both(told)).read(3)


def test_a_job_that_is_over_and_too_many_keys_are_refused() -> None:
    with pytest.raises(errors.NoSuchJob, match="words-1 has ended"):
        Host({"error": {"code": "gone", "message": ""}}).read("w")
    host = Host(both())
    with pytest.raises(errors.UsageError, match="10001 keys"):
        host.read(*range(MOST + 1))
    assert not host.asked


def test_batches_hold_all_keys_once_and_no_more_than_a_request_may() -> None:
    keys = ["x" * 900, *range(10_000), "y" * 30_000]
    parts = list(batches(keys))
    assert [key for part in parts for key in part] == keys
    assert all(len(json.dumps(part)) <= BATCH + 2 for part in parts[:-1])
    assert list(batches([])) == [[]]
