"""The rows of a checkpoint as one file, sorted by key, and `psctl.Reader`, which maps it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import psctl
from psctl.checkpoint.manifest import Manifest
from psctl.errors import UsageError
from psctl.kv.table_export import export_table
from psctl.ps.table_messages import Initialiser, TableSpec
from psctl.ps.tables.row_initialisers import initial_values
from psctl.ps.tables.server.saved_tables import copy_shard
from tests.checkpoint.conftest import write
from tests.ps.table_world import World, spec

KEYS = np.array([7, -3, 1 << 60, 12, 0, 99, -(1 << 63), 55])


def saved(root: Path, table: TableSpec, rows: torch.Tensor, keys: np.ndarray = KEYS) -> tuple[Path, Manifest]:
    """Write a checkpoint of a store with these rows, of two servers."""
    world = World(workers=1, servers=2)
    world.push(0, spec("named", (3,)), [0], torch.ones(3))
    if len(keys):
        order = np.argsort(keys)
        world.push(0, table, keys[order], rows[torch.from_numpy(order)])
    world.run()
    senders = {}
    for rank, machine in world.servers.items():
        held = [hosted for hosted in machine.shards_here.values() if "s" in hosted.state.stores]
        copied = [each for hosted in held for each in copy_shard(hosted.state.stores["s"], hosted.shard, 4)]
        senders[f"server/{rank}"] = [(each.slice, bytes(each.data)) for each in copied]
    return write(root, senders=senders)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8", "bool"])
def test_exported_rows_are_read_back_by_key(tmp_path, dtype) -> None:
    rows = torch.arange(48).reshape(8, 2, 3).to(getattr(torch, dtype))
    reduce = "logical-or" if dtype == "bool" else "sum"
    folder, manifest = saved(tmp_path, spec("", (2, 3), dtype, reduce=reduce), rows)
    count, size = export_table(folder, manifest, "s", out := tmp_path / "rows.safetensors")
    assert (count, size) == (8, out.stat().st_size)
    reader = psctl.Reader(out)
    assert len(reader) == 8
    assert reader.keys.tolist() == sorted(KEYS.tolist())
    assert torch.equal(reader.pull(KEYS), rows)
    assert torch.equal(reader.pull([99, 99, 5, 7]), torch.stack([rows[5], rows[5], 0 * rows[0], rows[0]]))
    assert torch.equal(reader.pull(12), rows[3])
    assert reader.pull([]).shape == (0, 2, 3)
    assert 99 in reader
    assert 98 not in reader
    plain = load_file(out)
    assert plain["keys"].tolist() == reader.keys.tolist()
    assert torch.equal(plain["rows"], reader.pull(reader.keys.copy()))
    assert not list(tmp_path.glob("*.partial"))


def test_absent_keys_have_their_start_values(tmp_path) -> None:
    initial = Initialiser("normal", 0.1, 5)
    folder, manifest = saved(tmp_path, spec("", (4,), "float32", initial=initial), torch.zeros(8, 4))
    export_table(folder, manifest, "s", out := tmp_path / "rows.safetensors")
    absent = np.array([1000, 2000])
    expected = torch.from_numpy(initial_values(initial, absent, 4)).float()
    assert torch.equal(psctl.Reader(out).pull(absent), expected)


def test_means_are_divided_by_their_counts(tmp_path) -> None:
    folder, manifest = saved(tmp_path, spec("", (1,), "float32", reduce="mean"), torch.arange(8.0)[:, None])
    export_table(folder, manifest, "s", out := tmp_path / "rows.safetensors")
    assert psctl.Reader(out).pull(KEYS).flatten().tolist() == list(range(8))


def test_a_store_without_rows_of_integer_keys_and_an_unknown_store_are_refused(tmp_path) -> None:
    folder, manifest = saved(tmp_path, spec(), torch.zeros(0, 1), KEYS[:0])
    with pytest.raises(UsageError, match="no rows of integer keys"):
        export_table(folder, manifest, "s", tmp_path / "rows.safetensors")
    with pytest.raises(UsageError, match="no store 'other'; it has: s"):
        export_table(folder, manifest, "other", tmp_path / "rows.safetensors")
    assert not (tmp_path / "rows.safetensors").exists()


def test_files_that_are_no_exported_tables_are_refused(tmp_path) -> None:
    folder, manifest = saved(tmp_path, spec("", (4,), "float32"), torch.zeros(8, 4))
    export_table(folder, manifest, "s", out := tmp_path / "rows.safetensors")
    whole = out.read_bytes()
    other = whole.replace(b'"F32"', b'"I32"'), whole.replace(b"psctl table", b"psctl fable")
    for number, data in enumerate([b"", whole[:5], whole[:-1], whole[:40], b"\xff" * 8 + whole[8:], *other]):
        (wrong := tmp_path / f"{number}.safetensors").write_bytes(data)
        with pytest.raises(UsageError, match="no exported table"):
            psctl.Reader(wrong)
    with pytest.raises(UsageError, match="cannot be read"):
        psctl.Reader(tmp_path / "none")
    with pytest.raises(UsageError, match="64 bits"):
        psctl.Reader(out).pull([1 << 64])


def test_start_values_may_be_made_by_a_function_of_the_reader(tmp_path) -> None:
    folder, manifest = saved(tmp_path, spec("", (1,), "float32"), torch.zeros(8, 1))
    export_table(folder, manifest, "s", out := tmp_path / "rows.safetensors")
    reader = psctl.Reader(out, initial=lambda keys, width: keys[:, None].float())
    assert reader.pull([41, 7]).tolist() == [[41.0], [0.0]]
    data = out.read_bytes()
    changed = data.replace(b'\\"initial\\":null', b'\\"initial\\":\\"a:b\\"')
    length = int.from_bytes(data[:8], "little") + len(changed) - len(data)
    assert changed != data
    out.write_bytes(length.to_bytes(8, "little") + changed[8:])
    with pytest.raises(UsageError, match="function a:b"):
        psctl.Reader(out)


def test_a_parquet_file_has_the_keys_and_rows(tmp_path) -> None:
    folder, manifest = saved(tmp_path, spec("", (2, 3), "bfloat16"), torch.arange(48).reshape(8, 2, 3).bfloat16())
    out = tmp_path / "rows.parquet"
    try:
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(UsageError, match="pyarrow"):
            export_table(folder, manifest, "s", out)
        assert not out.exists()
        return
    assert export_table(folder, manifest, "s", out)[0] == 8
    found = parquet.read_table(out)
    assert found["key"].to_pylist() == sorted(KEYS.tolist())
    assert found["row"].to_pylist()[sorted(KEYS).index(7)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found.schema.metadata[b"store"] == b"s"
