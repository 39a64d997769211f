"""The series that `weight_sync.py` publishes: bf16 weights of a policy after each step of reinforcement learning.

The policy is the 10.8 M parameter GPT of `workload_text.py`, trained for 320 steps to continue a text. Then AdamW
(betas .9/.999, weight decay .01, fp32 masters, clip 1) maximises a reward with the policy gradient of a group: at every
position four bytes are drawn from the policy, one that is the text's has reward 1, and what counts is the reward above
the group's mean. Published is what the masters round to in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import workload_text
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import REPO, Batch, seed_everything

from shrinkpoint_lab.demo.workload import GPT, GPTConfig

GROUP = 4  # bytes drawn at each position
PRETRAINING = 320
QUICK_SHAPE = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
Weights = dict[str, Tensor]


class Policy:
    """A GPT, its optimizer, and the batches that it acts on.

    Args:
        lr: learning rate.
        data: folder of published data.
        start: a recorded training of the same GPT, of which the first checkpoint is taken; None: it is trained now.
    """

    def __init__(self, lr: float, data: Path, start: Path | None, *, quick: bool = False) -> None:
        seed_everything(0, torch.get_num_threads())
        shape = QUICK_SHAPE if quick else workload_text.LARGE
        self.model = GPT(shape)
        _, self._text = workload_text.text(data)
        self._context, self._size = shape.context, 8
        self._generator = torch.Generator().manual_seed(1)
        if start is not None and start.exists() and not quick:
            _, weights, *_ = torch.load(start, map_location="cpu", weights_only=False, mmap=True)[0]
            self.model.load_state_dict(weights)
        else:
            self._pretrain(20 if quick else PRETRAINING)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)

    def step(self) -> float:
        """One step of the policy gradient; the mean reward."""
        inputs, targets = self._batch()
        log_probabilities = F.log_softmax(logits(self.model, inputs), -1)
        with torch.no_grad():
            flat = log_probabilities.exp().flatten(0, 1)
            actions = torch.multinomial(flat, GROUP, replacement=True, generator=self._generator)
            rewards = (actions == targets.flatten()[:, None]).float()
            advantages = rewards - rewards.mean(1, keepdim=True)
        loss = -(advantages * log_probabilities.flatten(0, 1).gather(1, actions)).mean()
        self._descend(self._optimizer, loss)
        return float(rewards.mean())

    def weights(self) -> Weights:
        """The weights as they are published: bf16, tied ones once."""
        return {name: value.detach().to(torch.bfloat16) for name, value in self.model.named_parameters()}

    def _batch(self) -> Batch:
        return workload_text.drawn(self._text, self._size, self._context, self._generator)

    def _pretrain(self, steps: int) -> None:
        optimizer = torch.optim.AdamW(self.model.param_groups(0.1), lr=1e-3, betas=(0.9, 0.95))
        for _ in range(steps):
            self._descend(optimizer, self.model(*self._batch()))

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()


def logits(model: GPT, inputs: Tensor) -> Tensor:
    """What the model gives each next byte, (batch, length, 256)."""
    x = model.token(inputs) + model.position(torch.arange(inputs.shape[1]))
    for block in model.blocks:
        x = block(x)
    out: Tensor = model.head(model.norm(x))
    return out


def published(
    lr: float, warmup: int, versions: int, data: Path, folder: Path, start: Path | None, *, quick: bool = False
) -> Iterator[Weights]:
    """The weights after `warmup` steps and after each of the `versions - 1` that follow; recorded in `folder`."""
    paths = [folder / f"weights-{lr:g}-{warmup}-{number}{'-quick' * quick}.pt" for number in range(versions)]
    if not all(path.exists() for path in paths):
        _record(Policy(lr, data, start, quick=quick), warmup, paths)
    for path in paths:
        yield torch.load(path)


def _record(policy: Policy, warmup: int, paths: list[Path]) -> None:
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for _ in range(warmup):
        policy.step()
    for number, path in enumerate(paths):
        reward = policy.step() if number else 0.0
        temporary = path.with_suffix(".tmp")
        torch.save(policy.weights(), temporary)
        temporary.replace(path)
        print(f"{path.name}: reward {reward:.3f}", flush=True)


def default_start() -> Path:
    """Where the studies of lossy schemes record the training that the policy begins with."""
    return REPO / "benchmarks" / "results" / "recordings" / "gpt_10M-640-0-320-50-7.pt"
