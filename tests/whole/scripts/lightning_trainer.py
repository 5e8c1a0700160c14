"""Lightning's Trainer: DDP, accumulation, clipping, validation, its own checkpoints."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 3))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        mean = self.all_gather(loss.detach()).mean()
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch} batch {index} loss {float(mean):.6f}", flush=True)
        return loss

    def validation_step(self, batch, index):
        self.log("held_out", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(4, verbose=False, workers=True)
here, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
x = torch.randn(320, 10)
data = TensorDataset(x, x[:, :3].argmax(1))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=here, num_nodes=world // here, strategy="ddp" if world > 1 else "auto",
    accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir="out",
)  # fmt: skip
trainer.fit(Net(), DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
if trainer.is_global_zero:
    print(f"held-out loss {float(trainer.callback_metrics['held_out']):.6f}", flush=True)
    assert os.path.exists(trainer.checkpoint_callback.best_model_path)
if world > 1:
    torch.distributed.destroy_process_group()
