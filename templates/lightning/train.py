"""A network learns two intertwined spirals apart, by Lightning's Trainer; nothing in this script is psctl's."""

from __future__ import annotations

import argparse
import math
import os

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(count: int, seed: int) -> TensorDataset:
    """Return points on two spirals, with noise, and the spiral of each."""
    random = torch.Generator().manual_seed(seed)
    turn = torch.rand(count, generator=random).sqrt() * 3 * math.pi
    kinds = torch.randint(2, (count,), generator=random)
    angle = turn + kinds * math.pi
    points = torch.stack((turn * angle.cos(), turn * angle.sin()), dim=1) / 10
    return TensorDataset(points + 0.03 * torch.randn(count, 2, generator=random), kinds)


class Spirals(lightning.LightningModule):
    """Three layers, trained by Adam."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        right = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--points", type=int, default=4000, help="to train on")
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--batch-size", type=int, default=64, help="points of a step, on each worker")
    arguments.add_argument("--lr", type=float, default=3e-3)
    options = arguments.parse_args()

    lightning.seed_everything(1, verbose=False)
    here, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accelerator="auto", devices=here, num_nodes=world // here,
        strategy="ddp" if world > 1 else "auto", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=10,
    )  # fmt: skip
    train = DataLoader(spirals(options.points, seed=1), batch_size=options.batch_size, shuffle=True)
    trainer.fit(Spirals(options.lr), train, DataLoader(spirals(1000, seed=2), batch_size=500))
    if trainer.is_global_zero:
        right = float(trainer.callback_metrics["accuracy"])
        print(f"accuracy {right:.4f} on 1000 points that were held out", flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()  # Gloo may abort a process that exits before it


if __name__ == "__main__":
    main()
