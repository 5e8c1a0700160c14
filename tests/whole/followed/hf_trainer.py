"""Hugging Face's Trainer with psctl's callback."""

import os
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from psctl.callbacks.hugging_face import HuggingFaceCallback


class Counting(Dataset):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int):
        ids = (torch.arange(8) + index) % 11
        return {"input_ids": ids, "labels": ids}


class Slow(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        print(f"rank {os.environ['RANK']} begins after step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **_):
        time.sleep(float(os.environ.get("PAUSE", "0")))


set_seed(8)
config = GPT2Config(
    vocab_size=11, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
    loss_type="ForCausalLM",
)  # fmt: skip
arguments = TrainingArguments(
    output_dir="out", max_steps=40, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, save_steps=10,
    seed=8, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip
callback = HuggingFaceCallback((lambda: trainer.model_wrapped) if os.environ.get("ACCELERATE") == "1" else None)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting(), callbacks=[callback, Slow()])
trainer.train(resume_from_checkpoint=callback.checkpoint)
if trainer.is_world_process_zero():
    total = sum(float(each.detach().double().abs().sum()) for each in trainer.model.parameters())
    print(f"trained: step {trainer.state.global_step}, parameters {total:.9f}", flush=True)
