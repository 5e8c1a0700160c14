"""A model of transformers in psctl's own loop; START names the files that it begins with, CONFIG gets its config."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import psctl

run = psctl.init()
config = GPT2Config(
    vocab_size=11, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
)  # fmt: skip
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = os.environ.get("START", "")
if start:
    psctl.load_start_values(start, model, optimizer if os.path.exists(f"{start}/.metadata") else None)
model, optimizer = run.prepare(model, optimizer)
ids = (torch.arange(8) + torch.arange(32).unsqueeze(1)) % 11
loader = run.loader([(row,) for row in ids], batch_size=8, shuffle=False)
for _ in run.epochs(int(os.environ["EPOCHS"])):
    for (rows,) in loader:
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        if run.rank == 0:
            print(f"loss {loss.item():.7e}", flush=True)
if run.rank == 0 and "CONFIG" in os.environ:
    config.save_pretrained(os.environ["CONFIG"])
