"""Lightning's Trainer with psctl's callback."""

import os
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psctl.callbacks.lightning import LightningCallback


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 3))

    def on_train_start(self) -> None:
        print(f"rank {self.global_rank} begins after step {self.global_step}", flush=True)

    def training_step(self, batch, index):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class ResumableLoader(DataLoader):
    """Continues after the batches that it had given, as Lightning requires for exact resumes within an epoch."""

    given = skipped = 0

    def __iter__(self):
        skipped, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__(), start=1):
            if number > skipped:
                self.given = number
                yield batch

    def state_dict(self):
        return {"given": self.given % len(self)}

    def load_state_dict(self, state):
        self.skipped = state["given"]


lightning.seed_everything(4, verbose=False, workers=True)
here, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
x = torch.randn(320, 10)
callback = LightningCallback("saved", accelerate=os.environ.get("ACCELERATE") == "1")
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", devices=here, num_nodes=world // here, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
)  # fmt: skip
data = ResumableLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)
trainer.fit(Net(), data, ckpt_path=callback.checkpoint)
if trainer.is_global_zero:
    total = sum(float(each.detach().double().abs().sum()) for each in trainer.model.parameters())
    print(f"trained: step {trainer.global_step}, parameters {total:.9f}", flush=True)
torch.distributed.destroy_process_group()
