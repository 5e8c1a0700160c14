"""A small GPT that learns to write, character by character: alone, under torchrun, or on a cluster with psctl."""

from __future__ import annotations

import argparse
import gzip
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import psctl

HERE = Path(__file__).resolve().parent


class Windows(Dataset):
    """Pieces of a text, each with the piece that begins one character later."""

    def __init__(self, codes: Tensor, context: int) -> None:
        self.codes, self.context = codes, context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.codes[start : start + self.context + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to the characters before, then two layers for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.questions, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.questions(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.layers(self.before_layers(x))


class Gpt(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.meaning, self.place = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.end, self.scores = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.scores(self.end(self.blocks(self.meaning(codes) + self.place(places))))


def loss_of(model: nn.Module, codes: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch; matrices are multiplied in bf16 where the device does that fast."""
    with torch.autocast("cuda", dtype=torch.bfloat16) if codes.is_cuda else nullcontext():
        scores = model(codes)
    return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: Windows, device: torch.device) -> float:
    """Return the mean loss of some pieces that are not trained on."""
    model.eval()
    pieces = [data[index] for index in range(min(64, len(data)))]
    codes, targets = (torch.stack(part).to(device) for part in zip(*pieces, strict=True))
    found = loss_of(model, codes, targets).item()
    model.train()
    return found


@torch.no_grad()
def write(model: nn.Module, context: int, alphabet: str, device: torch.device, length: int = 400) -> str:
    """Return a text that the model writes."""
    model.eval()
    codes = torch.tensor([[alphabet.index("\n")]], device=device)
    for _ in range(length):
        chances = F.softmax(model(codes[:, -context:])[:, -1].float() / 0.8, dim=-1)
        codes = torch.cat([codes, torch.multinomial(chances, 1)], dim=1)
    model.train()
    return "".join(alphabet[code] for code in codes[0].tolist())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--characters", type=int, default=None, help="train on so many characters of the text only")
    arguments.add_argument("--batch-size", type=int, default=32, help="pieces of one backward, over all workers")
    arguments.add_argument("--accumulate", type=int, default=2, help="backwards of one step")
    arguments.add_argument("--context", type=int, default=64, help="characters of a piece")
    arguments.add_argument("--width", type=int, default=96)
    arguments.add_argument("--layers", type=int, default=3)
    arguments.add_argument("--heads", type=int, default=4)
    arguments.add_argument("--lr", type=float, default=3e-3)
    options = arguments.parse_args()

    run = psctl.init()
    text = gzip.decompress((HERE / "moby-dick.txt.gz").read_bytes()).decode()
    alphabet = "".join(sorted(set(text)))
    table = {character: code for code, character in enumerate(alphabet)}
    codes = torch.tensor([table[character] for character in text])
    cut = len(codes) * 19 // 20  # the rest is held out
    train = Windows(codes[:cut][: options.characters], options.context)
    held_out = Windows(codes[cut:], options.context)

    net = Gpt(len(alphabet), options.context, options.width, options.layers, options.heads).to(run.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr, weight_decay=0.05)
    batches = -(-len(train) // options.batch_size)
    steps = options.epochs * -(-batches // options.accumulate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
    loader = run.loader(train, batch_size=options.batch_size)

    for _ in run.epochs(options.epochs):
        for number, (inputs, targets) in enumerate(loader, start=1):
            last = number % options.accumulate == 0 or number == len(loader)
            with nullcontext() if last else run.accumulate():  # only the last backward of a step sends gradients
                loss = loss_of(model, inputs.to(run.device), targets.to(run.device))
                (loss / options.accumulate).backward()
            if last:
                run.clip_grad_norm(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.report(loss=loss)
        run.report(validation_loss=validate(model, held_out, run.device))

    if os.environ.get("RANK", "0") == "0":
        print(write(model, options.context, alphabet, run.device), flush=True)


if __name__ == "__main__":
    main()
