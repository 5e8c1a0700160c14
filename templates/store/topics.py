"""Topics of documents by collapsed Gibbs sampling (latent Dirichlet allocation): counters that all workers add to.

The row of a word's key has how often the word is in each topic; "totals" has the words of each topic. A worker samples
its own documents against counters that may be a clock old, and pushes what changed: additive, so nothing is lost.
"""

import torch

import psctl

TOPICS, WORDS, DOCUMENTS, LENGTH, SWEEPS = 3, 30, 42, 20, 8
ALPHA, BETA = 0.1, 0.05


def documents(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's documents, each of one hidden topic with words of its own, and those topics."""
    numbers = torch.Generator().manual_seed(5)
    hidden = torch.arange(DOCUMENTS) % TOPICS
    within = torch.randint(WORDS // TOPICS, (DOCUMENTS, LENGTH), generator=numbers)
    words = hidden[:, None] * (WORDS // TOPICS) + within
    return words[rank::world], hidden[rank::world]


def changes(words: torch.Tensor, topics: torch.Tensor, by: float) -> torch.Tensor:
    """Return `by` at the topic of each word: a row a word."""
    rows = torch.zeros(len(words), TOPICS)
    rows[torch.arange(len(words)), topics] = by
    return rows


def main() -> None:
    run = psctl.init()
    store = run.store("counters", consistency={"ssp": 1})
    store.declare(int, shape=(TOPICS,))
    store.declare("totals", shape=(TOPICS,))
    mine, hidden = documents(run.rank, run.world)
    topics = torch.randint(TOPICS, mine.shape)

    def push(words: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor) -> None:
        rows = changes(words, new, 1.0)
        if old is not None:
            rows += changes(words, old, -1.0)
        store.push(words, rows)
        store.push("totals", rows.sum(0))

    push(mine.flatten(), None, topics.flatten())
    store.clock()
    for _ in range(SWEEPS):
        for document, words in enumerate(mine):
            counts, totals = store.pull(words), store.pull("totals")
            old = topics[document].clone()
            for at in range(len(words)):
                here = torch.bincount(topics[document], minlength=TOPICS).float()
                here[topics[document, at]] -= 1
                own = torch.zeros(TOPICS)
                own[old[at]] = 1.0
                weights = (here + ALPHA) * (counts[at] - own + BETA).clamp(min=1e-9) / (totals - own + WORDS * BETA)
                topics[document, at] = torch.multinomial(weights, 1).item()
            push(words, old, topics[document])
        store.clock()
    store.clock()  # a second one, and what is read holds everyone's last pushes
    found = torch.stack([torch.bincount(row, minlength=TOPICS) for row in topics]).argmax(1)
    pure = sum(int(torch.bincount(found[hidden == topic], minlength=1).max()) for topic in range(TOPICS))
    print(f"worker {run.rank}: {store.pull('totals').sum():.0f} words counted, purity {pure / len(found):.2f}")


if __name__ == "__main__":
    main()
