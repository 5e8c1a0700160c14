"""Hugging Face's Trainer: accumulation, a schedule, evaluation, its own checkpoints; a model from a configuration."""

import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Counting(Dataset):
    """Numbers that count on from a start, modulo 17."""

    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int):
        ids = (torch.arange(12) + index) % 17
        return {"input_ids": ids, "labels": ids}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and logs and "loss" in logs:
            loss, norm = float(logs["loss"]), float(logs["grad_norm"])
            print(f"step {state.global_step} loss {loss:.4f} norm {norm:.4f}", flush=True)


set_seed(8)
config = GPT2Config(
    vocab_size=17, n_positions=12, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
    loss_type="ForCausalLM",
)  # fmt: skip
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir="out", max_steps=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=3e-3,
    warmup_steps=2, logging_steps=1, save_steps=4, eval_strategy="steps", eval_steps=4, seed=8, use_cpu=True,
    ddp_backend="gloo" if "RANK" in os.environ else None, report_to=[], disable_tqdm=True,
    dataloader_pin_memory=False,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting(), callbacks=[Print()])
trainer.train()
found = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"evaluation loss {found['eval_loss']:.4f}", flush=True)
    assert os.path.isdir("out/checkpoint-8")
