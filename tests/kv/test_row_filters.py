"""Filters of pushed rows: what is sent, what the servers have of it, users' own classes, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from psctl.errors import JobFailed, MessageRefused, UsageError
from psctl.kv.open_store import Stores
from psctl.kv.store_connections import LocalServer
from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import FilterSpec, TableSpec, UpdateSection
from psctl.ps.tables.row_filters import FilterChain, PushNumbers, RandomSkip, filter_spec
from psctl.ps.tables.server.client_sessions import ClientSession
from psctl.ps.tables.table_packing import PayloadReader
from tests.kv.test_store import Net, Nowhere, alone

NUMBERS = PushNumbers(7, 0, 1)
KEYS = torch.randperm(4000, generator=torch.Generator().manual_seed(1)) * 977 - 10**6


def rows(count: int = 4000, width: int = 3, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def chain(*filters: object, dtype: torch.dtype = torch.float32, width: int = 3, **more) -> FilterChain:
    spec = TableSpec("", (width,), str(dtype)[6:], filters=tuple(map(filter_spec, filters)), **more)
    return FilterChain(spec, dtype, JobFunctions())


# ---- each filter -----------------------------------------------------------------------------------------------------


def test_random_skip_is_unbiased_and_the_same_for_the_same_push() -> None:
    given = torch.ones(len(KEYS), 3)
    sent = chain({"random_skip": 0.75}).on_push(KEYS.numpy(), given, NUMBERS)
    again = chain({"random_skip": {"p": 0.75}}).on_push(KEYS.numpy(), given, NUMBERS)
    assert torch.equal(sent.kept, again.kept)
    assert torch.equal(sent.rows, torch.full((len(sent.rows), 3), 4.0))
    assert abs(sent.rows[:, 0].sum() / len(KEYS) - 1.0) < 0.1, "the mean is right"
    for other in (PushNumbers(8, 0, 1), PushNumbers(7, 0, 0)):
        assert not torch.equal(sent.kept, chain({"random_skip": 0.75}).on_push(KEYS.numpy(), given, other).kept)
    half = RandomSkip(0.75).select(KEYS[:2000], given[:2000], NUMBERS)[0]
    assert torch.equal(half, sent.kept[:2000]), "a key's choice does not depend on the other keys"


def test_significance_sends_everything_in_the_end_but_what_is_held_back() -> None:
    filters, total, given = (
        chain({"significance": 1.0}, dtype=torch.float64),
        torch.zeros(4000, 3),
        torch.zeros(4000, 3),
    )
    total, given = total.double(), given.double()
    for step in range(20):
        pushed = rows(seed=step).double()
        given += pushed
        sent = filters.on_push(KEYS.numpy(), pushed, NUMBERS)
        total[sent.kept] += sent.rows
        assert 0.2 < sent.kept.double().mean() < 0.6
    assert filters.sent < 0.5 * filters.offered
    last = filters.on_push(KEYS.numpy(), torch.zeros(4000, 3).double(), NUMBERS)
    left = given - total
    assert torch.allclose(last.rows, left[last.kept], atol=1e-12), "later pushes have what was held back, once"
    assert left.square().mean(dim=1).sqrt().max() < 6.0, "nothing is held back for ever"


def test_a_row_that_is_not_finite_is_sent_and_not_kept() -> None:
    filters, pushed = chain({"significance": 1e9}), rows(4)
    pushed[1, 2], pushed[3, 0] = float("nan"), float("inf")
    assert filters.on_push(KEYS[:4].numpy(), pushed, NUMBERS).kept.tolist() == [False, True, False, True]
    later = filters.on_push(KEYS[:4].numpy(), torch.full((4, 3), 1e-3), NUMBERS)
    assert not later.kept.any()
    coded = chain("int8").on_push(KEYS[:4].numpy(), pushed, NUMBERS).rows
    assert coded.isfinite().all(dim=1).tolist() == [True, False, True, False]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 3), (torch.float64, 17), (torch.bfloat16, 1)])
def test_int8_is_unbiased_and_within_one_step_of_its_scale(dtype: torch.dtype, width: int) -> None:
    given, total = rows(width=width).to(dtype), torch.zeros(4000, width, dtype=torch.float64)
    scale = given.double().abs().amax(dim=1, keepdim=True) / 127
    for number in range(30):
        sent = chain("int8", dtype=dtype, width=width).on_push(KEYS.numpy(), given, PushNumbers(number, 0, 0))
        assert sent.coded is not None and sent.coded.shape == (4000, 4 + width) and sent.coded.dtype == torch.uint8
        error = (sent.rows.double() - given.double()).abs()
        assert (error <= scale * 1.001 + given.double().abs() * (0.01 if dtype == torch.bfloat16 else 0)).all()
        total += sent.rows.double()
    if dtype != torch.bfloat16 and width > 1:
        assert abs(((total / 30 - given.double()) / scale).mean()) < 0.01, "unbiased"
    zero = chain("int8", width=width).on_push(KEYS.numpy(), torch.zeros(4000, width), NUMBERS)
    assert not zero.rows.any()


@pytest.mark.parametrize("consistency", ["asp", "bsp", {"ssp": 1}])
@pytest.mark.parametrize("filters", [["int8"], ["bf16"], ["fp16"], [{"random_skip": 0.5}, "int8"]])
def test_all_workers_read_what_was_sent_bit_by_bit(consistency, filters: list[object]) -> None:
    with Net(2, servers=2, consistency=consistency, replicas=1) as net:

        def script(store) -> torch.Tensor:
            store.declare(int, shape=(3,), filters=filters)
            if store.rank == 0:
                store.push(KEYS, rows()).wait()
                seen = store.pull(KEYS)
            if consistency != "asp":
                store.clock()
                store.clock()
            return seen if store.rank == 0 else None

        own, _ = net.run(script)
        (first, other) = net.run(lambda store: store.pull(KEYS))
        assert torch.equal(first, own), "a worker sees its own push as the servers decode it"
        assert torch.equal(first, other)
        counts = net.stores[0].sent()
        share = 0.5 if len(filters) == 2 else 1.0
        assert counts["rows"] == 4000 and abs(counts["rows_sent"] / 4000 - share) < 0.05
        each = {"int8": 15, "bf16": 14, "fp16": 14}[filters[-1]]
        assert counts["bytes"] == 4000 * 20 and counts["bytes_sent"] == each * counts["rows_sent"]


def test_a_lost_server_changes_nothing_of_what_was_sent() -> None:
    def train(lose: bool) -> torch.Tensor:
        with Net(2, servers=3, consistency="bsp", replicas=1) as net:

            def script(store, begin: int, end: int) -> torch.Tensor:
                store.declare(int, shape=(3,), filters=[{"significance": 0.8}, "int8"])
                for step in range(begin, end):
                    store.push(KEYS[step * 100 :], rows(seed=step * 2 + store.rank)[step * 100 :])
                    store.clock()
                return store.pull(KEYS)

            net.run(lambda store: script(store, 0, 5))
            if lose:
                net.lose(1)
            first, other = net.run(lambda store: script(store, 5, 10))
            assert torch.equal(first, other)
            return first

    assert torch.equal(train(lose=False), train(lose=True))


# ---- KKT -------------------------------------------------------------------------------------------------------------


def lasso(filters: list[object], workers: int = 2, passes: int = 80, slack: float = 0.0) -> tuple[torch.Tensor, dict]:
    """Minimize 1/2 |Xw - y|^2 + l1 |w|_1 by proximal gradient, each worker with a part of the rows of X."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200, 120, generator=generator, dtype=torch.float64)
    truth = torch.zeros(120, dtype=torch.float64)
    truth[:8] = 2.0
    y = x @ truth + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    rate = 1.0 / float(torch.linalg.matrix_norm(x, 2)) ** 2
    keys = torch.arange(120) * 31 + 5
    with Net(workers, servers=2, consistency="bsp") as net:

        def script(store) -> torch.Tensor:
            rule = {"name": "proximal", "lr": rate, "l1": 25.0, "slack": slack}
            store.declare(int, shape=(1,), dtype=torch.float64, optimizer=rule, filters=filters)
            mine, wanted = x[store.rank :: workers], y[store.rank :: workers]
            for _ in range(passes):
                weights = store.pull(keys)[:, 0]
                store.push(keys, (mine.T @ (mine @ weights - wanted))[:, None])
                store.clock()
            return store.pull(keys)[:, 0]

        found = net.run(script)
        assert all(torch.equal(found[0], each) for each in found)
        return found[0], net.stores[1].sent() if filters else {}


def test_the_kkt_filter_keeps_rows_out_and_changes_no_solution() -> None:
    expected, _ = lasso([])
    assert 5 < int((expected != 0).sum()) < 40
    found, counts = lasso([{"kkt": {"every": 4}}])
    assert counts["rows_sent"] < 0.45 * counts["rows"], "of four passes one sends all"
    assert torch.allclose(found, expected, atol=1e-6)
    every, counts = lasso([{"kkt": 1}])
    assert torch.equal(every, expected) and counts["rows_sent"] == counts["rows"]


def test_inactive_rows_are_marked_by_a_negative_zero() -> None:
    store = alone(consistency="bsp")
    store.declare(int, shape=(1,), optimizer={"name": "proximal", "lr": 0.5, "l1": 1.0, "slack": 0.5, "l2": 2.0})
    store.push([1, 2, 3, 4], torch.tensor([[0.5], [0.75], [-3.0], [float("nan")]]))
    store.clock()
    one, two, three, four = store.pull([1, 2, 3, 4])[:, 0]
    assert one == 0 and one.signbit(), "well within the penalty"
    assert two == 0 and not two.signbit()
    assert three == (1.5 - 0.5) / (1.0 + 0.5 * 2.0)
    assert four.isnan()


# ---- users' classes --------------------------------------------------------------------------------------------------

MINE = '''
import torch
import psctl

class Halves(psctl.RowFilter):
    """Sends the rows of even keys as integers of a step."""

    def __init__(self, step=0.5):
        self.step, self.seen = step, []

    def select(self, keys, rows, numbers):
        return keys % 2 == 0, rows

    def encode(self, keys, rows, numbers):
        return (rows / self.step).round().to(torch.int16)

    def decode(self, keys, coded):
        return coded.to(torch.float32) * self.step

class Reads(psctl.RowFilter):
    """Sends only rows that it has read as smaller than one."""

    def __init__(self):
        self.large = set()

    def select(self, keys, rows, numbers):
        return torch.tensor([key not in self.large for key in keys.tolist()], dtype=torch.bool), rows

    def on_read(self, keys, rows):
        self.large |= {key for key, row in zip(keys.tolist(), rows, strict=True) if row.max() >= 1.0}

class Broken(psctl.RowFilter):
    def __init__(self, how):
        self.how = how

    def select(self, keys, rows, numbers):
        if self.how == "select":
            raise ValueError("no")
        return (torch.ones(1) if self.how == "bools" else keys > 0), (rows.double() if self.how == "rows" else rows)

class Fails(psctl.RowFilter):
    def encode(self, keys, rows, numbers):
        return rows.to(torch.float16)

    def decode(self, keys, coded):
        Fails.calls = getattr(Fails, "calls", 0) + 1
        if Fails.calls > 1:  # the first call is the worker's
            raise ValueError("the servers cannot")
        return coded.float()

def function(keys):
    return keys

class Other:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "minefilters.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("psctl.process.job_modules.script_folder", lambda: str(tmp_path))
    sys.modules.pop("minefilters", None)
    return str(tmp_path)


def test_a_users_class_selects_encodes_and_decodes_on_both_ends(folder: str) -> None:
    with Net(2, servers=2, consistency="bsp") as net:

        def script(store) -> torch.Tensor:
            store.declare(int, shape=(2,), filters=[{"minefilters:Halves": {"step": 0.25}}])
            store.push(torch.arange(100), torch.full((100, 2), 0.6 + store.rank))
            store.clock()
            return store.pull(torch.arange(100))

        found, other = net.run(script)
        assert torch.equal(found, other)
        assert torch.equal(found[::2], torch.full((50, 2), 0.5 + 1.5)), "rounded to quarters, each worker's"
        assert not found[1::2].any()
        assert net.stores[0].sent() == {"rows": 100, "rows_sent": 50, "bytes": 1600, "bytes_sent": 50 * (8 + 4)}


def test_a_users_class_sees_what_is_read(folder: str) -> None:
    store = alone(consistency="bsp")
    store.declare(int, shape=(1,), filters=["minefilters:Reads"])
    for _ in range(3):
        store.push([1, 2], torch.tensor([[1.0], [0.25]]))
        store.clock()
        found = store.pull([1, 2, 77])
    assert found[:, 0].tolist() == [1.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("how", "says"),
    [("select", "select: ValueError: no"), ("bools", "no bools"), ("rows", "torch.float64 of shape")],
)
def test_a_users_class_that_fails_is_named(folder: str, how: str, says: str) -> None:
    store = alone()
    store.declare(int, shape=(1,), filters=[{"minefilters:Broken": {"how": how}}])
    with pytest.raises(UsageError, match=says):
        store.push([1, 2, 3], torch.ones(3, 1))
    assert not store.pull([1, 2, 3]).any()


def test_a_decoder_that_fails_on_a_server_ends_the_job(folder: str) -> None:
    with Net(1, servers=1) as net:
        (store,) = net.stores
        store.declare(int, shape=(1,), filters=["minefilters:Fails"])
        with pytest.raises(JobFailed, match=r"minefilters:Fails failed in decode: ValueError: the servers cannot"):
            store.push([1, 2], torch.ones(2, 1)).wait()
        store.close(failed=True)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ("int8", "give a list"), ([3], "filter 3"), (["int4"], "no filter has the name 'int4'"),
        ([{"random_skip": 1.0}], "p=1.0"), ([{"random_skip": -0.1}], "p=-0.1"), (["random_skip"], "without p"),
        ([{"random_skip": {"p": 0.5, "speed": 1}}], "no setting 'speed'"), ([{"random_skip": True}], "p=True"),
        ([{"significance": "much"}], "v='much'"), ([{"significance": float("nan")}], "v=nan"),
        (["kkt"], "proximal"), ([{"kkt": 0}], "every=0"), ([{"kkt": 2.5}], "whole number"),
        (["int8", {"random_skip": 0.5}], "write it last"), (["bf16", "int8"], "write it last"),
        ([{"int8": 3}], "by name"), ([{"a": 1, "b": 2}], "one filter in each entry"),
        (["minefilters:Missing"], "defines no class"), (["minefilters:function"], "defines no class"),
        (["minefilters:Other"], "is no filter"), (["os:PathLike"], "not of the job's folder"),
        (["__main__:X"], "servers do not run the script"),
        ([{"minefilters:Halves": {"pace": 1}}], "unexpected keyword"),
        ([{"minefilters:Halves": {"step": [1]}}], "numbers, texts or bools"),
    ],
)  # fmt: skip
def test_invalid_filters_are_refused_with_the_reason(folder: str, filters: object, says: str) -> None:
    with pytest.raises(UsageError) as found:
        alone(consistency="bsp").declare(int, shape=(1,), filters=filters)
    assert says in f"{found.value.message}; {found.value.hint}"


def test_filters_that_do_not_fit_the_table_or_the_store_are_refused() -> None:
    proximal = {"name": "proximal", "lr": 0.1, "l1": 1.0}
    for consistency, options, says in (
        ("asp", {"filters": ["kkt"], "optimizer": proximal}, "not bsp"),
        ("bsp", {"filters": ["int8"], "dtype": torch.int64}, "floating-point"),
        ("bsp", {"filters": [{"random_skip": 0.5}], "reduce": "mean"}, "need a sum"),
        ("bsp", {"filters": [{"significance": 0.5}], "reduce": "max"}, "need a sum"),
    ):
        with pytest.raises(UsageError) as found:
            alone(consistency=consistency).declare(int, shape=(1,), **options)
        assert says in f"{found.value.message}; {found.value.hint}"
    with pytest.raises(UsageError) as named:
        alone().declare("w", shape=(3,), filters=["int8"])
    assert named.value.hint == "only rows of integer keys are filtered"
    store = alone()
    store.declare(int, shape=(1,))
    with pytest.raises(UsageError, match="without filters"):
        store.sent()


def test_ranks_that_declare_other_filters_are_refused() -> None:
    stores = Stores(0, 1, LocalServer, Nowhere())
    store = stores.open("s", "asp", "lazy", None)
    store.declare(int, shape=(1,), filters=["int8"])
    with pytest.raises(UsageError, match="filters is"):
        store.declare(int, shape=(1,))


@pytest.mark.parametrize("filters", [(), (FilterSpec("random_skip", {"p": 0.5}),), (FilterSpec("int8"),)])
def test_a_server_refuses_encoded_rows_of_a_table_that_has_none(filters: tuple[FilterSpec, ...]) -> None:
    session = ClientSession(0, 0, -1)
    spec = TableSpec("", (2,), "float32", filters=filters)
    payload = memoryview(bytearray(8 + 8))
    section = UpdateSection(
        0, "", 1, "start" if filters[:1] == (FilterSpec("int8"),) else "push", spec, coded=("uint8", 6)
    )
    with pytest.raises(MessageRefused, match="no filter that encodes"):
        session.read_part(section, PayloadReader(payload), JobFunctions())


@pytest.mark.parametrize(
    ("form", "says"), [(("uint8", 3), "int8 failed in decode|decode returned"), (("qint8", 6), "does not accept")]
)
def test_a_server_refuses_a_code_of_another_form(form: tuple[str, int], says: str) -> None:
    session = ClientSession(0, 0, -1)
    spec = TableSpec("", (2,), "float32", filters=(FilterSpec("int8"),))
    section = UpdateSection(0, "", 1, spec=spec, coded=form)
    with pytest.raises(UsageError, match=says):
        session.read_part(section, PayloadReader(memoryview(bytearray(64))), JobFunctions())
