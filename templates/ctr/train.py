"""Predicts clicks, or the rating of a sentence, from sparse features; prints the AUC on other examples."""

import argparse
import json

import torch
from data import Clicks, Reviews, auc, collate
from models import DeepFM, Logistic
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import psctl


def data_of(name: str, features: int, *, test: bool) -> Dataset:
    return Reviews(test=test) if name == "reviews" else Clicks(test=test, features=features)


def score(model: torch.nn.Module, test: Dataset) -> float:
    """Return the AUC on the test examples; it pulls rows and pushes none."""
    scores, labels = [], []
    with torch.no_grad():
        for keys, offsets, y in DataLoader(test, 1000, collate_fn=collate):
            scores.append(model(keys, offsets))
            labels.append(y)
    return auc(torch.cat(scores), torch.cat(labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["logistic", "deepfm"], default="logistic")
    parser.add_argument("--data", choices=["reviews", "clicks"], default="reviews")
    parser.add_argument("--features", type=int, default=10**9, help="possible features of the generated clicks")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--l1", type=float, default=0.01, help="of the logistic regression")
    parser.add_argument("--width", type=int, default=16, help="elements of a row of DeepFM")
    parser.add_argument("--filters", type=json.loads, default=[], help='of pushed rows: ["int8"]')
    given = parser.parse_args()

    run = psctl.init()
    model = Logistic(given.l1, given.filters) if given.model == "logistic" else DeepFM(given.width, 128, given.filters)
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.002))
    loader = run.loader(data_of(given.data, given.features, test=False), given.batch, collate_fn=collate)
    for _ in run.epochs(given.epochs):
        for keys, offsets, y in loader:
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(keys, offsets), y)
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
    if run.rank == 0:
        found = score(model, data_of(given.data, given.features, test=True))
        run.report(auc=found)
        line = f"AUC {found:.4f} after {run.step} steps"
        if given.model == "logistic":
            weights = model.weights.rows.store.pull(range(-(1 << 63), (1 << 63) - 1))[1]
            line += f"; {int((weights != 0).sum())} of {len(weights)} weights are not zero"
        print(line, flush=True)
        if given.filters:
            rows = model.weights.rows if given.model == "logistic" else model.rows.rows
            print(f"sent {json.dumps(rows.store.sent())} by this worker", flush=True)


if __name__ == "__main__":
    main()
