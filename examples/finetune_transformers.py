"""Hugging Face's Trainer with compressed checkpoints: `ShrinkTrainer` in place of `Trainer`.

    pip install "shrinkpoint[transformers]"
    python examples/finetune_transformers.py

A GPT-2 of two layers reads Python's own standard library, byte by byte; nothing is downloaded. The second Trainer does
what a new process does after a crash.
"""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import shrinkpoint as sp
from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer, from_pretrained

FOLDER, CONTEXT = "runs/transformers", 64


def read_pieces(count: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of the standard library's source: a byte is a token."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    text = bytearray(b"".join(file.read_bytes() for file in files))[: count * CONTEXT]
    pieces = torch.frombuffer(text, dtype=torch.uint8).long().reshape(count, CONTEXT)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    pieces = read_pieces(2048)
    train, held_out = pieces[:-128], pieces[-128:]
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    # At most 1% more loss, as the Trainer's own evaluation measures it; without `shrink=`, nothing is lost.
    shrink = ShrinkConfig(scheme=partial(sp.Fisher, budget="1%"), evaluate="eval_loss")
    for steps in (20, 40):
        set_seed(0)
        trainer = ShrinkTrainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                FOLDER, max_steps=steps, save_steps=10, save_total_limit=2, learning_rate=1e-3, report_to="none",
                per_device_train_batch_size=16, use_cpu=True, disable_tqdm=True, logging_steps=10,
            ),
            train_dataset=train,
            eval_dataset=held_out,
            shrink=shrink,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=steps > 20)
        print(f"step {trainer.state.global_step}: {trainer.wait_for_checkpoint()!r}")

    # Straight out of the newest compressed checkpoint, without an unpacked copy on the disk.
    model = from_pretrained(AutoModelForCausalLM, FOLDER).eval()
    batch = torch.stack([piece["input_ids"] for piece in held_out])
    with torch.no_grad():
        losses = [each.eval()(input_ids=batch, labels=batch).loss.item() for each in (trainer.model, model)]
    print(f"loss of the trained model {losses[0]:.3f}, of its checkpoint {losses[1]:.3f}")


if __name__ == "__main__":
    main()
