"""The hash index on arrays finds exactly the keys that were added; rows grow and keep their values."""

from __future__ import annotations

import numpy as np
import torch

from psctl.ps.tables.row_index import KeyIndex, TableRows, mix, mix_one, shard_of, shard_of_one


def splitmix(key: int) -> int:
    mask = (1 << 64) - 1
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & mask
    return key ^ (key >> 31)


def test_the_hash_is_the_finaliser_of_splitmix64() -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    right = [splitmix(key & (2**64 - 1)) for key in keys]
    assert mix(np.array(keys)).tolist() == right
    assert [mix_one(key) for key in keys] == right


def test_an_index_equals_a_dict() -> None:
    index, known, numbers = KeyIndex(), {}, np.random.default_rng(1)
    for _ in range(20):
        keys = np.unique(numbers.integers(-50, 50, 30) * 2**40)
        new = keys[index.find(keys) < 0]
        known.update(zip(new.tolist(), index.add(new).tolist(), strict=True))
    keys = np.array(list(known))
    assert index.find(keys).tolist() == list(known.values()) == list(range(len(known)))
    assert (index.find(keys + 1) == -1).all()
    assert [index.find(keys[at : at + 1]).tolist() for at in range(len(keys))] == [[slot] for slot in known.values()]
    assert all(index.find(keys[at : at + 1] + 1).tolist() == [-1] for at in range(len(keys)))
    assert KeyIndex().find(keys[:1]).tolist() == [-1]
    assert index.keys[: len(index)].tolist() == keys.tolist()


def test_shards_hold_equal_shares_of_hash_values() -> None:
    counts = np.bincount(shard_of("", np.arange(40_000), 8))
    assert counts.min() > 4_600
    assert counts.max() < 5_400
    assert len({int(shard_of(name, np.zeros(1, dtype=np.int64), 8)[0]) for name in "abcdefghijk"}) > 3


def test_the_shard_of_a_key_does_not_depend_on_other_keys() -> None:
    keys = np.random.default_rng(2).integers(-(2**63), 2**63, 500)
    for table, shards in (("", 8), ("w", 5), ("\u00fc", 1)):
        assert [shard_of_one(table, int(key), shards) for key in keys] == shard_of(table, keys, shards).tolist()


def test_rows_grow_and_keep_their_values() -> None:
    rows = TableRows(2, torch.float32, 1)
    for start in range(0, 100, 10):
        slots = torch.from_numpy(rows.add(np.arange(start, start + 10)))
        rows.lanes.values[slots] = torch.arange(start, start + 10).float()[:, None]
        assert rows.lanes.extra is not None
        rows.lanes.extra[slots] = slots[:, None]
    at = torch.from_numpy(rows.find(np.arange(100)))
    assert rows.lanes.values[at].tolist() == [[float(key)] * 2 for key in range(100)]
    assert rows.lanes.extra is not None
    assert rows.lanes.extra[at].flatten().tolist() == list(range(100))
