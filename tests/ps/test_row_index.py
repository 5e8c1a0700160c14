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


def test_an_index_with_removals_equals_a_dict() -> None:
    index, known, numbers = KeyIndex(), {}, np.random.default_rng(3)
    for turn in range(300):
        keys = np.unique(numbers.integers(-400, 400, 90) * 2**33)
        new = keys[index.find(keys) < 0]
        known.update(zip(new.tolist(), index.add(new).tolist(), strict=True))
        gone = numbers.choice(np.array(list(known)), min(len(known), int(numbers.integers(0, 120))), replace=False)
        slots = index.find(gone)
        moved, to = index.remove(slots)
        by_slot = {slot: key for key, slot in known.items()}
        for key in gone.tolist():
            del known[key]
        for old, place in zip(moved.tolist(), to.tolist(), strict=True):
            known[by_slot[old]] = place
        if turn == 150:
            index.remove(np.arange(len(index)))
            known.clear()
        every = np.arange(-400, 400) * 2**33
        assert index.find(every).tolist() == [known.get(int(key), -1) for key in every]
        assert sorted(known.values()) == list(range(len(index)))
        assert [int(index.find(np.array([key]))[0]) for key in known] == list(known.values())
    assert index.nbytes < 40_000  # places of removed keys are used again


def test_a_full_index_takes_few_bytes_beyond_its_keys() -> None:
    index, most = KeyIndex(), 0.0
    for start in range(0, 600_000, 5_000):
        index.add(mix(np.arange(start, start + 5_000)).view(np.int64))
        most = max(most, index.nbytes / len(index)) if start > 100_000 else 0.0
    assert most < 24


def test_rows_move_when_others_are_removed_and_cached_lists_of_slots_are_dropped() -> None:
    rows = TableRows(1, torch.float32, 1, lambda count: torch.zeros(count, 1))
    slots = torch.from_numpy(rows.add(np.arange(10)))
    rows.lanes.values[slots] = slots.float()[:, None]
    assert rows.lanes.extra is not None
    assert rows.state is not None
    rows.lanes.extra[slots], rows.state[slots] = slots[:, None], slots.float()[:, None]
    listed = np.array([2, 9, 5])
    listed.flags.writeable = False
    assert rows.find(listed).tolist() == [2, 9, 5]
    moved, to = rows.remove(np.array([5, 0, 8]))
    assert (moved.tolist(), to.tolist()) == ([7, 9], [0, 5])
    assert rows.find(listed).tolist() == [2, 5, -1]
    for key in (1, 2, 3, 4, 6, 7, 9):
        at = int(rows.find(np.array([key]))[0])
        assert (rows.lanes.values[at].item(), rows.lanes.extra[at].item(), rows.state[at].item()) == (key, key, key)
