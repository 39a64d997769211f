"""A run whose checkpoints are in a bucket; on any machine that reaches it, run it again, and it goes on.

    pip install "shrinkpoint[cloud]"
    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=...    # not needed where the machine has a role
    export AWS_ENDPOINT=https://...                                          # of another service than Amazon's
    python examples/s3.py s3://BUCKET/runs/first                             # or gs://..., az://...

It learns to tell scikit-learn's handwritten digits apart; each run takes 60 more steps.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import shrinkpoint as sp

STEPS, SAVE_EVERY = 60, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the checkpoints go, such as s3://BUCKET/runs/first")
    url = parser.parse_args().url

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # `background=True`: the loop waits for a copy of the state; coding and upload happen beside it.
    with sp.CheckpointManager(url, keep=sp.Keep(last=2), background=True) as manager:
        restored = manager.restore(model=model, optimizer=optimizer)
        first = 1 if restored is None else restored.step + 1
        print("starts" if restored is None else f"resumes after step {restored.step}", flush=True)
        for step in range(first, first + STEPS):
            batch = torch.randint(len(images), (128,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == 0:
                manager.save(step, model=model, optimizer=optimizer, metrics={"loss": loss.item()})

    with sp.Store(url) as store:  # closing the manager has waited for the last upload
        for manifest in store.list():
            print(f"step {manifest.step}: {manifest.kind}, {manifest.stored_bytes:,} bytes of {manifest.raw_bytes:,}")
    weights = sp.load(url, only="model.*")["model"]  # reads the weights' part of the objects, not the moments'
    print("the last layer, read back:", tuple(weights["4.weight"].shape))


if __name__ == "__main__":
    main()
