"""Reinforcement learning in two processes: one generates with Hugging Face's `generate`, the other one trains.

    python examples/weight_sync.py

A tiny GPT-2 with random weights learns to say even numbers. It takes some seconds on two cores.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shrinkpoint.sync import Publisher, Subscriber

WHERE = Path("runs/weight_sync")  # in /dev/shm: shared memory; "s3://bucket/weights": a bucket
STEPS, BATCH, LENGTH, VOCABULARY = 30, 32, 8, 64


def build() -> GPT2LMHeadModel:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH + 1, "n_embd": 64, "n_layer": 2, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=None, pad_token_id=0))


def generate(samples: multiprocessing.Queue[tuple[int, list[list[int]]]]) -> None:
    """Follow the trainer's weights, in bf16, and send what the model says with each version."""
    torch.set_num_threads(1)
    model, subscriber = build().bfloat16().eval(), Subscriber(WHERE, poll=0.01)
    for update in subscriber.follow(model, wait=60):
        start = torch.zeros(BATCH, 1, dtype=torch.long)
        tokens = model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, max_new_tokens=LENGTH)
        print(f"generated with {update}", flush=True)
        samples.put((update.version, tokens.tolist()))


def loss_of(model: GPT2LMHeadModel, tokens: Tensor, rewards: Tensor) -> Tensor:
    """The policy gradient: what was rewarded above the mean becomes likelier."""
    logits = model(tokens[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss: Tensor = -((rewards - rewards.mean()) * chosen).mean()
    return loss


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    samples = context.Queue()
    generator = context.Process(target=generate, args=(samples,), daemon=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Publisher(WHERE, dtype=torch.bfloat16) as publisher:
        publisher.publish(model)
        generator.start()
        for step in range(STEPS):
            version, rows = samples.get(timeout=120)
            tokens = torch.tensor(rows)
            rewards = (tokens[:, 1:] % 2 == 0).float()
            optimizer.zero_grad()
            loss_of(model, tokens, rewards).backward()
            optimizer.step()
            report = publisher.publish(model)
            if step % 10 == 0 or step == STEPS - 1:
                print(
                    f"step {step}, with version {version}: reward {rewards.mean():.2f}; published {report}", flush=True
                )
        samples.get(timeout=120)
    generator.terminate()


if __name__ == "__main__":
    main()
