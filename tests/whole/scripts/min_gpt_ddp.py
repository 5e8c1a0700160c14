"""The API use of minGPT-ddp: a Trainer class over DDP and DistributedSampler that saves snapshots.

The rows of an epoch are shuffled by the sampler; the forward runs under autocast.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class Remainders(Dataset):
    """Numbers in binary, and their remainders."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int):
        return torch.tensor([float(index >> bit & 1) for bit in range(8)]), index % 5


class Trainer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, train: Dataset, test: Dataset) -> None:
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.model, self.optimizer, self.snapshot = model, optimizer, Path("snapshot.pt")
        self.train_loader, self.test_loader = self.loader(train), self.loader(test)
        self.done = 0
        if self.snapshot.exists():
            found = Snapshot(**torch.load(self.snapshot, map_location="cpu"))
            self.model.load_state_dict(found.model_state)
            self.optimizer.load_state_dict(found.optimizer_state)
            self.done = found.finished_epoch
            print(f"rank {self.global_rank} resumes after epoch {self.done}", flush=True)
        self.model = DDP(self.model)

    def loader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, batch_size=16, shuffle=False, num_workers=1, sampler=DistributedSampler(dataset))

    def run_batch(self, x, y, train: bool) -> float:
        with torch.set_grad_enabled(train), torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True):
            loss = F.cross_entropy(self.model(x), y)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch: int, loader: DataLoader, train: bool) -> None:
        loader.sampler.set_epoch(epoch)
        losses = [self.run_batch(x, y, train) for x, y in loader]
        if self.global_rank == 0:
            print(f"epoch {epoch} {'train' if train else 'test'} loss {sum(losses) / len(losses):.6f}", flush=True)

    def train(self, epochs: int) -> None:
        for epoch in range(self.done, epochs):
            self.run_epoch(epoch, self.train_loader, train=True)
            if self.global_rank == 0:
                torch.save(asdict(Snapshot(self.model.module.state_dict(), self.optimizer.state_dict(), epoch + 1)),
                           self.snapshot)  # fmt: skip
            self.run_epoch(epoch, self.test_loader, train=False)
        barrier()


def main() -> None:
    init_process_group(backend="gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, test = random_split(Remainders(), [224, 32], generator=torch.Generator().manual_seed(1))
    Trainer(model, optimizer, train, test).train(3)
    destroy_process_group()


if __name__ == "__main__":
    main()
