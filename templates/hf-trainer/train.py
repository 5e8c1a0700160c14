"""A small transformer learns to add, by Hugging Face's Trainer; nothing in this script is psctl's."""

from __future__ import annotations

import argparse
import os
import random

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LETTERS = "0123456789+=."
LENGTH = 12  # of "47+85=132...", filled up with dots


class Sums(Dataset):
    """Sums such as 47+85=132, one letter a token; only the letters of the result count for the loss."""

    def __init__(self, count: int, seed: int) -> None:
        numbers = random.Random(seed)
        pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(count)]
        texts = [f"{a}+{b}={a + b}" for a, b in pairs]
        self.tokens = torch.tensor([[LETTERS.index(letter) for letter in text.ljust(LENGTH, ".")] for text in texts])
        self.labels = self.tokens.clone()
        for row, text in zip(self.labels, texts, strict=True):
            row[: text.index("=") + 1] = -100  # what the Trainer leaves out of the loss

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sums", type=int, default=8000, help="to train on")
    arguments.add_argument("--epochs", type=int, default=8)
    arguments.add_argument("--batch-size", type=int, default=64, help="sums of a step, on each worker")
    arguments.add_argument("--lr", type=float, default=2e-3)
    options = arguments.parse_args()

    on_gpu, several = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1")) > 1
    set_seed(1)
    settings = TrainingArguments(
        output_dir="out", num_train_epochs=options.epochs, per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr, lr_scheduler_type="cosine", warmup_steps=50, logging_steps=50, save_strategy="no",
        seed=1, use_cpu=not on_gpu, bf16=on_gpu, ddp_backend="gloo" if several and not on_gpu else None, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=on_gpu,
    )  # fmt: skip
    config = GPT2Config(
        vocab_size=len(LETTERS), n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=settings, train_dataset=Sums(options.sums, seed=1),
        eval_dataset=Sums(500, seed=2),
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"evaluation loss {found['eval_loss']:.4f} on 500 sums that were held out", flush=True)


if __name__ == "__main__":
    main()
