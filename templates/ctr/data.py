"""Two data sets of examples with sparse features: sentences of film reviews, and clicks that a seed generates.

An example is (keys, label): the 64-bit keys of its features, and 1.0 or 0.0.
"""

import gzip
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from psctl.nn import SparseEmbedding

Example = tuple[torch.Tensor, float]
Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Reviews(Dataset):
    """Sentences with their words and pairs of words as features; the label is whether people rated them positive."""

    def __init__(self, *, test: bool) -> None:
        lines = gzip.decompress((Path(__file__).parent / "reviews.txt.gz").read_bytes()).decode().splitlines()
        known: dict[str, int] = {}
        self.examples: list[Example] = []
        for number, line in enumerate(lines):
            if (number % 10 == 0) is test:
                _, rating, sentence = line.split("\t")
                words = re.findall(r"[a-z']+", sentence.lower())
                features = {*words, *(" ".join(pair) for pair in pairwise(words))} or {""}
                keys = [known.setdefault(one, SparseEmbedding.key(one)) for one in sorted(features)]
                self.examples.append((torch.tensor(keys), float(float(rating) > 0)))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


class Clicks(Dataset):
    """Generated clicks: each of 20 fields has a value, a few of them often (zipf), out of very many possible ones.

    Whether there is a click depends on hidden weights of the values and of pairs of fields, which are hashes of them.

    Args:
        test: other examples of the same distribution.
        examples: how many.
        features: number of possible features over all fields.
    """

    FIELDS = 20

    def __init__(self, *, test: bool, examples: int = 20_000, features: int = 10**9) -> None:
        numbers = np.random.default_rng(2 if test else 1)
        values = numbers.zipf(1.3, (examples, self.FIELDS)) % (features // self.FIELDS)
        keys = values * self.FIELDS + np.arange(self.FIELDS)
        self.keys = torch.from_numpy(keys.astype(np.int64))
        score = hidden(self.keys, 1.0).sum(dim=1)
        pairs = hidden(self.keys[:, ::2], 0.7) * hidden(self.keys[:, 1::2] + 1, 1.0)
        score = score + pairs.sum(dim=1) - 0.5
        self.labels = torch.from_numpy(numbers.random(examples)) < torch.sigmoid(score)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Example:
        return self.keys[index], float(self.labels[index])


def hidden(keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the hidden weight of each key: a hash of it, uniform in [-scale, scale)."""
    mixed = (keys * 0x1F123BB5 + 0x2545F491) * 0x5851F42D  # modulo 2^64
    return ((mixed >> 24) & 0xFFFF).double() / 0x8000 * scale - scale


def collate(examples: list[Example]) -> Bags:
    """Return the keys of all examples one after another, where each example's begin, and the labels."""
    counts = torch.tensor([0, *(len(keys) for keys, _ in examples[:-1])])
    return torch.cat([keys for keys, _ in examples]), counts.cumsum(0), torch.tensor([label for _, label in examples])


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the area under the ROC curve: the probability that a positive example has the higher score."""
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (count.cumsum(0) - (count - 1) / 2.0)[place].double()  # equal scores share their mean rank
    positive = labels > 0.5
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))
