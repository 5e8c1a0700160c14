"""Models of sparse features: logistic regression, and DeepFM. Their rows are on the servers, the rest is dense."""

import torch
from torch import nn

from psctl.nn import SparseEmbedding, SparseEmbeddingBag


class Logistic(nn.Module):
    """Logistic regression with an l1 penalty: FTRL-proximal keeps the weights of features that tell little at zero.

    Args:
        l1: the penalty.
        filters: of the gradients that are pushed.
    """

    def __init__(self, l1: float, filters: list) -> None:
        super().__init__()
        ftrl = {"name": "ftrl", "alpha": 3.0, "beta": 1.0, "l1": l1, "l2": 1e-4}
        self.weights = SparseEmbeddingBag(None, 1, mode="sum", optimizer=ftrl, filters=filters)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, keys: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.weights(keys, offsets).squeeze(1) + self.bias


class DeepFM(nn.Module):
    """DeepFM (Guo and others 2017): a logistic regression, a factorization machine and a network on the same rows.

    The network's input is the mean row of an example, so that examples may have any number of features.

    Args:
        width: elements of a row.
        hidden: neurons of each of the two hidden layers.
        filters: of the gradients of rows that are pushed.
    """

    def __init__(self, width: int, hidden: int, filters: list) -> None:
        super().__init__()
        adagrad = {"name": "rowwise-adagrad", "lr": 0.05}
        self.first = SparseEmbeddingBag(None, 1, mode="sum", optimizer={"name": "adagrad", "lr": 0.05}, initial=0.0)
        self.rows = SparseEmbedding(None, width, optimizer=adagrad, initial={"normal": 0.05}, filters=filters)
        self.network = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, keys: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = self.rows(keys)
        counts = torch.diff(offsets, append=torch.tensor([len(keys)]))
        example = torch.repeat_interleave(torch.arange(len(offsets)), counts)
        nothing = rows.new_zeros(len(offsets), rows.shape[1])
        total, squares = nothing.index_add(0, example, rows), nothing.index_add(0, example, rows.square())
        pairs = 0.5 * (total.square() - squares).sum(dim=1)
        means = total / counts.clamp(min=1)[:, None]
        return self.first(keys, offsets).squeeze(1) + pairs + self.network(means).squeeze(1)
