"""A seeded logistic regression problem with many more features than examples, most of them of no use."""

import torch


class Problem:
    """Sparse examples in the order of features: for each feature, the examples that have it.

    Args:
        examples, features: their numbers.
        per_example: features that an example has.
        rank, world: this worker's share of the examples.
        seed: of the whole problem.
    """

    def __init__(
        self, examples: int, features: int, per_example: int = 20, rank: int = 0, world: int = 1, seed: int = 3
    ) -> None:
        numbers = torch.Generator().manual_seed(seed)
        popular = (torch.rand(examples, per_example, generator=numbers, dtype=torch.float64) ** 2 * features).long()
        truth = torch.zeros(features, dtype=torch.float64)
        useful = torch.randperm(features // 4, generator=numbers)[: features // 40]
        truth[useful] = torch.randn(len(useful), generator=numbers, dtype=torch.float64) * 3
        score = truth[popular].sum(dim=1)
        label = torch.rand(examples, generator=numbers, dtype=torch.float64) < torch.sigmoid(score)
        mine = torch.arange(rank, examples, world)
        pairs = torch.stack([popular[mine].flatten(), torch.arange(len(mine)).repeat_interleave(per_example)])
        pairs = torch.unique(pairs, dim=1)  # sorted by feature; an example has a feature once
        self.features, self.labels = features, label[mine].double() * 2 - 1
        self.feature, self.example = (each.contiguous() for each in pairs)
        self.begin = torch.searchsorted(self.feature, torch.arange(features + 1))

    def block(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (feature, example) pairs of a range of features; each value is 1."""
        within = slice(int(self.begin[start]), int(self.begin[stop]))
        return self.feature[within], self.example[within]
