"""SparseEmbedding and SparseEmbeddingBag: one worker and several take the trajectory of torch's own; refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psctl.clock import SystemClock
from psctl.errors import UsageError
from psctl.kv.prefetched_rows import PrefetchedRows
from psctl.kv.store import Store
from psctl.nn import SparseEmbedding, SparseEmbeddingBag
from psctl.worker.run import Run
from psctl.worker.standalone import StandaloneSession
from tests.helpers.job_world import Job
from tests.helpers.table_servers import TableServers
from tests.sync.test_sharded import sharded

KEYS, WIDTH, COUNT = 40, 3, 54


class Net(nn.Module):
    """An embedding and a bag of it, or those of torch, below a dense layer."""

    def __init__(self, one: nn.Module, bag: nn.Module) -> None:
        super().__init__()
        self.one, self.bag = one, bag
        self.dense = nn.Linear(2 * WIDTH, 1, dtype=torch.float64)
        with torch.no_grad():
            self.dense.weight.copy_(torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64))
            self.dense.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat([self.one(x[:, 0]), self.bag(x[:, 1:])], dim=1)).squeeze(1)


def data(every: bool = False) -> TensorDataset:
    """`every`: each batch of 18 has all keys, as SparseAdam needs them to count as rows of their own do."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, KEYS, (COUNT, 4), generator=generator)
    if every:
        columns = [torch.cat([torch.randperm(18, generator=generator) for _ in range(3)]) for _ in range(4)]
        x = torch.stack(columns, dim=1)
    return TensorDataset(x, torch.randn(COUNT, generator=generator, dtype=torch.float64))


def sparse(optimizer, **more) -> Net:
    options = {"optimizer": optimizer, "dtype": torch.float64, "initial": {"normal": 0.5, "seed": 7}, **more}
    return Net(SparseEmbedding(KEYS, WIDTH, **options), SparseEmbeddingBag(KEYS, WIDTH, mode="sum", **options))


def train(
    run: Run, net: Net, batch: int = 18, epochs: int = 4, accumulate: bool = False, every: bool = False, keys_of=None
):
    """Train; return the rows before and after, the dense weight, and what a second read of the rows gives."""
    model, optimizer = run.prepare(net, torch.optim.SGD(net.dense.parameters(), lr=0.05))
    keys = torch.arange(KEYS)
    with torch.no_grad():
        before = [model.one(keys), model.bag(keys[:, None])]
    for _ in run.epochs(epochs):
        for x, y in run.loader(data(every), batch_size=batch, shuffle=not every, keys=keys_of and keys_of(model)):
            optimizer.zero_grad()
            if accumulate:
                with run.accumulate():
                    (model(x[:1]) - y[:1]).square().sum().div(len(y)).backward()
                (model(x[1:]) - y[1:]).square().sum().div(len(y)).backward()
            else:
                (model(x) - y).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        after = [model.one(keys), model.bag(keys[:, None])]
    run.wait()
    return before, after, model.dense.weight.detach().clone()


def torch_alone(before: list[torch.Tensor], make, batch: int = 18, every: bool = False):
    """Train torch's own from the same rows, on the batches that a run alone takes."""
    one = nn.Embedding(KEYS, WIDTH, sparse=True, dtype=torch.float64)
    bag = nn.EmbeddingBag(KEYS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
    with torch.no_grad():
        one.weight.copy_(before[0])
        bag.weight.copy_(before[1])
    net = Net(one, bag)
    run = alone_run()
    torch.sparse.check_sparse_tensor_invariants.enable()  # else torch's own optimizers warn
    dense, rows = torch.optim.SGD(net.dense.parameters(), lr=0.05), make([one.weight, bag.weight])
    stand_in = nn.Linear(1, 1)  # the run only deals the batches
    run.prepare(stand_in, torch.optim.SGD(stand_in.parameters(), lr=0.0))
    for _ in run.epochs(4):
        for x, y in run.loader(data(every), batch_size=batch, shuffle=not every):
            dense.zero_grad(), rows.zero_grad()
            (net(x) - y).square().mean().backward()
            dense.step(), rows.step()
    return [one.weight.detach(), bag.weight.detach()], net.dense.weight.detach()


def alone_run() -> Run:
    return Run(StandaloneSession(0, 1, "alone", 0), None, SystemClock())


def alone(script):
    run = alone_run()
    found = script(run)
    run.finish()
    return found


def together(workers: int, script, strategy: str = "ps", **terms):
    job = Job(workers, 2, strategy=strategy, **terms)
    tables = TableServers(job.network)
    job.tables = tables.link
    try:
        return job.run(script)
    finally:
        tables.close()


def assert_near(one, other, tolerance: float = 1e-12) -> None:
    for left, right in zip(one, other, strict=True):
        assert (left - right).norm() <= tolerance * max(1.0, float(right.norm()))


OPTIMIZERS = {
    "sgd": ({"name": "sgd", "lr": 0.1}, lambda rows: torch.optim.SGD(rows, lr=0.1), False),
    "adagrad": ({"name": "adagrad", "lr": 0.1}, lambda rows: torch.optim.Adagrad(rows, lr=0.1), False),
    # SparseAdam adds eps before it corrects the bias, and counts the steps of the table
    "adam": ({"name": "adam", "lr": 0.01, "eps": 0.0}, lambda r: torch.optim.SparseAdam(r, lr=0.01, eps=1e-99), True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_trains_as_torch_does(name) -> None:
    settings, make, every = OPTIMIZERS[name]
    before, after, dense = alone(lambda run: train(run, sparse(settings), every=every))
    rows, weight = torch_alone(before, make, every=every)
    assert_near([*after, dense], [*rows, weight])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("update", ["server", "worker"])
def test_workers_train_as_one_does_on_the_joint_batch(name, update) -> None:
    settings, make, every = OPTIMIZERS[name]
    batch = 18 if every else 17  # ragged shares
    for before, after, dense in together(
        3, lambda run: train(run, sparse(settings), batch, every=every), update=update
    ):
        rows, weight = torch_alone(before, make, batch, every)
        assert_near([*after, dense], [*rows, weight])


def keys_of(model: Net):
    """Return what `run.loader(keys=)` takes for this model."""
    return lambda batch: {model.one: batch[0][:, 0], model.bag: batch[0][:, 1:]}


class Requests:
    """Counts pulls that take rows which were requested before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._takes: list[int] = []  # threads append
        take = PrefetchedRows.take

        def taking(rows, keys, clock):
            found = take(rows, keys, clock)
            if found is not None:
                self._takes.append(clock)
            return found

        monkeypatch.setattr(PrefetchedRows, "take", taking)

    @property
    def taken(self) -> int:
        return len(self._takes)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("update", ["server", "worker"])
def test_prefetched_rows_change_no_bit_under_bsp(name, update, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OPTIMIZERS[name][0]
    expected = together(3, lambda run: train(run, sparse(settings), 17), update=update)
    counts = Requests(monkeypatch)
    found = together(3, lambda run: train(run, sparse(settings), 17, keys_of=keys_of), update=update)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one[1], other[1], strict=True))
        assert torch.equal(one[2], other[2])
    assert counts.taken == 3 * 2 * 4 * (4 - 1), "of an epoch's four batches all but the first"


@pytest.mark.parametrize("consistency", ["asp", {"ssp": 1}])
def test_rows_are_prefetched_by_workers_apart(consistency, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Requests(monkeypatch)
    options = {"optimizer": {"name": "sgd", "lr": 0.1}, "consistency": consistency}
    for before, after, _ in together(2, lambda run: train(run, sparse(**options), epochs=6, keys_of=keys_of)):
        assert not torch.equal(before[0], after[0])
    assert counts.taken == 2 * 2 * 6 * 2


POOLED = {"optimizer": {"name": "adagrad", "lr": 0.1}, "pool": "server", "initial": {"normal": 0.5, "seed": 7}}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("form", ["rows", "offsets", "last-offset"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_added_on_servers_are_those_of_torch(mode, form, padding) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(0, 12, (5, 30), generator=generator)
    arguments = [x] if form == "rows" else [x.flatten()[:100], torch.tensor([0, 40, 40, 99])]
    if form == "last-offset":
        arguments[1] = torch.tensor([0, 40, 40, 99, 100])
    options = {"mode": mode, "padding_idx": padding, "include_last_offset": form == "last-offset"}

    def script(run):
        bag = SparseEmbeddingBag(12, WIDTH, dtype=torch.float64, **options, **POOLED)
        model = nn.ModuleList([bag, nn.Linear(1, 1)])
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = nn.EmbeddingBag(12, WIDTH, sparse=True, dtype=torch.float64, **options)
        keys = torch.arange(12)
        with torch.no_grad():
            own.weight.copy_(SparseRead(bag)(keys))
        steps = torch.optim.Adagrad([own.weight], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            given, expected = bag(*arguments), own(*arguments)
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-13)
            given.square().sum().backward(), expected.square().sum().backward()
            optimizer.step(), steps.step()
            with torch.no_grad():
                torch.testing.assert_close(SparseRead(bag)(keys), own.weight.detach(), rtol=0, atol=1e-12)

    torch.sparse.check_sparse_tensor_invariants.enable()
    alone(script)


@pytest.mark.parametrize("accumulate", [False, True])
def test_workers_with_bags_added_on_servers_train_as_with_rows(accumulate, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    push = Store.push_sums
    monkeypatch.setattr(Store, "push_sums", lambda *given: pushed.append(1) or push(*given))
    found = {}
    for pool in ("server", "worker"):
        net = lambda pool=pool: Net(  # noqa: E731
            SparseEmbedding(KEYS, WIDTH, optimizer={"name": "sgd", "lr": 0.1}, dtype=torch.float64,
                            initial={"normal": 0.5, "seed": 7}),
            SparseEmbeddingBag(KEYS, WIDTH, mode="sum", dtype=torch.float64, **{**POOLED, "pool": pool}),
        )  # fmt: skip
        found[pool] = together(3, lambda run, net=net: train(run, net(), 17, accumulate=accumulate))
        assert bool(pushed) is not accumulate, "two backwards of a step are one push of rows"
    for one, other in zip(found["server"], found["worker"], strict=True):
        assert_near([*one[1], one[2]], [*other[1], other[2]])
    assert torch.equal(found["server"][0][1][1], found["server"][1][1][1]), "all ranks read the same rows"


def test_bags_are_added_where_that_takes_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    pull = Store.pull_sums
    monkeypatch.setattr(Store, "pull_sums", lambda *given: calls.append(1) or pull(*given))

    def script(run):
        bag = SparseEmbeddingBag(None, 16, mode="sum", optimizer={"name": "sgd", "lr": 0.1})
        model = nn.ModuleList([bag, nn.Linear(1, 1)])
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        wide = torch.arange(4000).reshape(2, 2000)
        sums = bag(wide)
        assert len(calls) == 1, "4000 rows, or a sum of each of two bags in each shard"
        expected = bag.rows.store.pull(wide.flatten()).reshape(2, 2000, 16).sum(dim=1)
        torch.testing.assert_close(sums.detach(), expected, rtol=1e-5, atol=1e-3)
        bag(torch.arange(200).reshape(200, 1))
        bag(torch.zeros(4, 500, dtype=torch.int64))
        bag(wide, per_sample_weights=torch.ones(2, 2000))
        assert len(calls) == 1, "short bags, one key, weights: rows are pulled"
        bag.prefetch(wide)
        bag(wide)
        assert len(calls) == 1, "rows that are on their way are used"

    alone(script)
    with pytest.raises(UsageError, match="pool='both'"):
        SparseEmbeddingBag(4, 4, pool="both", optimizer="sgd")
    with pytest.raises(UsageError, match="with filters"):
        SparseEmbeddingBag(4, 4, pool="server", filters=["int8"], optimizer="sgd")


def test_wrong_keys_of_a_loader_are_refused() -> None:
    def refused(run, keys):
        model = nn.ModuleList([SparseEmbedding(9, 4, optimizer={"name": "sgd", "lr": 0.1}), nn.Linear(1, 1)])
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError) as found:
            next(iter(run.loader(data(), batch_size=18, keys=keys(model))))
        return f"{found.value.message}; {found.value.hint}"

    assert "returned list" in alone(lambda run: refused(run, lambda model: lambda batch: [1, 2]))
    assert "for Linear" in alone(lambda run: refused(run, lambda model: lambda batch: {model[1]: batch[0]}))
    assert "int64" in alone(lambda run: refused(run, lambda model: lambda batch: batch[1]))

    def without(run):
        net = nn.Linear(1, 1)
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(UsageError, match="without an embedding"):
            next(iter(run.loader(data(), batch_size=18, keys=lambda batch: batch[0])))

    alone(without)


def test_a_loop_that_is_left_with_rows_on_their_way_ends() -> None:
    def script(run):
        model, optimizer = run.prepare(
            net := sparse(OPTIMIZERS["sgd"][0]), torch.optim.SGD(net.dense.parameters(), 0.1)
        )
        for x, y in run.loader(data(), batch_size=18, keys=keys_of(model)):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            break
        return [model.one.rows.store, model.bag.rows.store]

    for stores in together(2, script):
        assert all(store.closed for store in stores)


def test_several_backwards_of_a_step_are_one_gradient() -> None:
    settings, make, _ = OPTIMIZERS["adagrad"]
    before, after, dense = alone(lambda run: train(run, sparse(settings), accumulate=True))
    rows, weight = torch_alone(before, make)
    assert_near([*after, dense], [*rows, weight])
    for found in together(2, lambda run: train(run, sparse(settings), accumulate=True)):
        assert len(found[1]) == 2


@pytest.mark.parametrize("consistency", ["asp", {"ssp": 1}])
def test_workers_apart_train_too(consistency) -> None:
    found = together(2, lambda run: train(run, sparse({"name": "sgd", "lr": 0.1}, consistency=consistency), epochs=6))
    for before, after, _ in found:
        assert not torch.equal(before[0], after[0])


def test_bags_and_padding_as_in_torch() -> None:
    x, offsets = torch.tensor([3, 5, 0, 3, 9, 0]), torch.tensor([0, 2, 2, 5])
    weights = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)

    def script(run, mode):
        bag = SparseEmbeddingBag(
            10, WIDTH, mode=mode, padding_idx=0, dtype=torch.float64, optimizer={"name": "sgd", "lr": 0.5}
        )
        model = nn.ModuleList([bag, nn.Linear(1, 1)])
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = nn.EmbeddingBag(10, WIDTH, mode=mode, padding_idx=0, sparse=True, dtype=torch.float64)
        keys = torch.arange(10)
        with torch.no_grad():
            own.weight.copy_(SparseRead(bag)(keys))
        more = {"per_sample_weights": weights} if mode == "sum" else {}
        given, expected = bag(x, offsets, **more), own(x, offsets, **more)
        assert torch.equal(given, expected)
        given.square().sum().backward(), expected.square().sum().backward()
        optimizer.step(), torch.optim.SGD([own.weight], lr=0.5).step()
        torch.testing.assert_close(SparseRead(bag)(keys), own.weight.detach(), rtol=0, atol=1e-14)

    for mode in ("sum", "mean"):
        alone(lambda run, mode=mode: script(run, mode))


class SparseRead:
    """Reads single rows through a bag."""

    def __init__(self, bag: SparseEmbeddingBag) -> None:
        self._bag = bag

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._bag(keys[:, None])


def test_64_bit_keys_evaluation_and_copies() -> None:
    def script(run):
        embedding = SparseEmbedding(None, 4, optimizer={"name": "adagrad", "lr": 0.1})
        model = nn.Sequential(embedding, nn.Linear(4, 1))
        with pytest.raises(UsageError, match=r"before run\.prepare"):
            model(torch.tensor([1]))
        assert len(list(model.parameters())) == 2
        assert list(model.state_dict()) == ["1.weight", "1.bias"]
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        keys = torch.tensor([[-(1 << 63), (1 << 63) - 1], [5, 5]])
        with torch.no_grad():
            first = embedding(keys)
        assert first.shape == (2, 2, 4)
        store = embedding.rows.store
        assert len(store.pull(range(-(1 << 63), (1 << 63) - 1))[0]) == 0, "reading makes no row"
        model(keys)  # a forward without a backward pushes nothing
        optimizer.step()
        assert len(store.pull(range(10))[0]) == 0
        model(keys).sum().backward()
        optimizer.step()
        assert store.pull(range(10))[0].tolist() == [5]
        other = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(other[0](keys), embedding(keys))
        with pytest.raises(UsageError, match=r"before run\.prepare"):
            pickle.loads(pickle.dumps(embedding))(keys)
        embedding.requires_grad_(False)
        frozen = embedding(keys)
        model(keys).sum().backward()
        optimizer.step()
        assert torch.equal(frozen, embedding(keys))
        assert not len(embedding(torch.empty(0, dtype=torch.int64)))

    alone(script)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(UsageError, match="num_embeddings=0"):
        SparseEmbedding(0, 4, optimizer="sgd")
    with pytest.raises(UsageError, match="mode='max'"):
        SparseEmbeddingBag(4, 4, mode="max", optimizer="sgd")

    def script(run):
        model = nn.Sequential(SparseEmbedding(8, 4, optimizer={"name": "sgd", "lr": 0.1}), nn.Linear(4, 1))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(IndexError, match="key 8 of an embedding of 8 rows"):
            model(torch.tensor([8]))
        with pytest.raises(UsageError, match="float32"):
            model(torch.tensor([1.0]))
        with pytest.raises(UsageError, match="clip_grad_norm"):
            run.clip_grad_norm(1.0)

    alone(script)
    twice = [SparseEmbedding(8, 4, optimizer={"name": "sgd", "lr": 0.1}, name="same") for _ in range(2)]
    with pytest.raises(UsageError, match="name='same'"):
        alone(lambda run: run.prepare(nn.Sequential(*twice, nn.Linear(4, 1))))
    with pytest.raises(UsageError, match="lr"):
        alone(lambda run: run.prepare(nn.Sequential(SparseEmbedding(8, 4, optimizer="sgd"), nn.Linear(4, 1))))


@pytest.mark.parametrize(("consistency", "most"), [("bsp", 100), ({"ssp": 2}, 800)])
def test_a_worker_keeps_no_rows_that_it_can_not_read_again(consistency, most) -> None:
    def script(run):
        embedding = SparseEmbedding(None, 4, optimizer={"name": "sgd", "lr": 0.1}, consistency=consistency)
        model = nn.Sequential(embedding, nn.Linear(4, 1))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(40):
            model(torch.arange(100 * step, 100 * (step + 1))).sum().backward()
            optimizer.step()
        (cache,) = embedding.rows.store._state._view._caches.values()
        return len(cache._table.rows)

    assert alone(script) <= most


@pytest.mark.parametrize("bucket", [4, 1_000_000], ids=["a-bucket-a-parameter", "one-bucket"])
def test_embeddings_with_a_sharded_optimizer_train_as_one_worker_does(bucket: int, tmp_path: Path) -> None:
    """Its parameters have new values when the next forward reaches them; rows of embeddings come from servers."""
    settings, make, _ = OPTIMIZERS["adagrad"]
    with sharded(tmp_path, "ring", bucket=bucket) as job:
        tables = TableServers(job.network)
        job.tables = tables.link
        try:
            results = job.run(lambda run: train(run, sparse(settings), 17, keys_of=keys_of))
        finally:
            tables.close()
    for before, after, dense in results:
        rows, weight = torch_alone(before, make, 17)
        assert_near([*after, dense], [*rows, weight])
