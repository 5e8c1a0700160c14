"""accelerate: prepare, accumulate, clip_grad_norm_, gather_for_metrics, save_state and load_state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(11)
x = torch.randn(256, 12)
data = TensorDataset(x, x[:, :4].argmax(1))
model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for number, (a, b) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(a), b)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather_for_metrics(loss.detach().reshape(1)).mean()
        accelerator.print(f"epoch {epoch} batch {number} loss {float(mean):.6f}", flush=True)
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
right = sum(int(accelerator.gather_for_metrics(model(a).argmax(1) == b).sum()) for a, b in loader)
accelerator.print(f"loss over: {right} of {len(data)} right", flush=True)
accelerator.end_training()
