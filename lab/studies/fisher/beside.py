"""Bytes of what is saved beside a model with `fisher`: averages, target networks, references, buffers, tables, copies.

`python -m lab.studies.fisher.beside` prints a table of docs/fisher_studies.md: a byte GPT of 0.25 M parameters with
AdamW, a delta every 10 or 100 steps, a budget of 1%. Each object is saved alone beside model and optimizer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

import shrinkpoint as sp
from shrinkpoint.storage import MemoryStorage
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

SAVES = 11
TEXT = torch.tensor([*b"".join(path.read_bytes() for path in sorted(Path(sp.__file__).parent.rglob("*.py")))])
BATCHES = torch.randint(len(TEXT) * 9 // 10, len(TEXT) - 65, (8, 16), generator=torch.Generator().manual_seed(1))


def batch(starts: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.stack([TEXT[start : start + 65] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def evaluate(model: nn.Module) -> Tensor:
    model.eval()
    return torch.stack([model(*batch(starts)) for starts in BATCHES])


class Training:
    """The training, and what is saved beside it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(layers=2, width=96, heads=4, context=64, dropout=0.0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.averages = {
            decay: AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay)) for decay in (0.99, 0.999)
        }
        self.steps(100)
        self.frozen, self.target = copy.deepcopy(self.model), copy.deepcopy(self.model)
        self.old_optimizer = torch.optim.AdamW(self.target.parameters())
        self.old_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.buffer = {"frames": torch.randint(0, 256, (2000, 200)).byte(), "rewards": torch.randn(100_000)}
        self.table = {"merges": [[n, n + 1] for n in range(5000)], "scores": torch.randn(5000)}

    def steps(self, count: int) -> None:
        self.model.train()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(*batch(torch.randint(0, len(TEXT) * 9 // 10 - 65, (16,)))).backward()
            self.optimizer.step()
            for average in self.averages.values():
                average.update_parameters(self.model)

    def hard_copy(self) -> nn.Module:
        """The target network: the model as it was at the last hundredth step."""
        if int(self.optimizer.state_dict()["state"][0]["step"]) % 100 == 0:
            self.target.load_state_dict(self.model.state_dict())
        return self.target


BESIDE: dict[str, Callable[[Training], dict[str, Any]]] = {
    "nothing": lambda run: {},
    "EMA, decay 0.99": lambda run: {"ema": run.averages[0.99]},
    "EMA, decay 0.999": lambda run: {"ema": run.averages[0.999]},
    "target network, copied every 100 steps": lambda run: {"target": run.hard_copy()},
    "frozen reference or teacher": lambda run: {"reference": run.frozen},
    "replay buffer, not changed": lambda run: {"extra": {"buffer": run.buffer}},
    "tokenizer's table": lambda run: {"extra": {"table": run.table}},
    "older copy of the optimizer": lambda run: {"old": run.old_optimizer},
}


def raw_bytes(value: Any) -> int:
    """Bytes of the tensors of a nest, tied ones once."""
    tensors = {x.data_ptr(): x.nbytes for x in tree_leaves(value) if isinstance(x, Tensor)}
    return sum(tensors.values())


class Chain:
    """A chain of checkpoints with one object beside the model.

    Attributes:
        sizes: bytes of each file.
        raw: bytes of the object.
        rises: of the loss of a copy of the model as it is loaded.
    """

    def __init__(self, beside: Callable[[Training], dict[str, Any]]) -> None:
        self._beside, self.sizes, self.raw, self.rises = beside, list[int](), 0, list[float]()
        scheme = sp.Fisher(budget="1%", evaluate=evaluate)
        self._manager = sp.CheckpointManager(MemoryStorage(), scheme=scheme, keyframe_every=100)

    def save(self, run: Training, step: int) -> None:
        objects = self._beside(run)
        report = self._manager.save(step, model=run.model, optimizer=run.optimizer, **objects)
        self.sizes.append(report.stored_bytes)
        loaded = self._manager.store.load(step)
        self.raw = raw_bytes([loaded[name] for name in objects])
        for found, (name, part) in zip(report.copies.values(), objects.items(), strict=False):
            other = copy.deepcopy(part)
            other.load_state_dict(loaded[name])
            with torch.no_grad():
                before, after = (evaluate(copy.deepcopy(getattr(x, "module", x))).mean() for x in (part, other))
            self.rises.append(float(after / before) - 1)
            assert found.rise is not None and abs(found.rise - self.rises[-1]) < 1e-5


def measure(every: int) -> dict[str, Chain]:
    """Chains of one training, by what they have beside the model."""
    run = Training()
    chains = {title: Chain(beside) for title, beside in BESIDE.items()}
    for step in range(SAVES):
        run.steps(every)
        for chain in chains.values():
            chain.save(run, step)
    return chains


def main() -> None:
    warnings.simplefilter("ignore")
    print("| beside the model | its bytes | keyframe | delta, 10 steps | delta, 100 steps | worst rises |")
    print("|---|---|---|---|---|---|")
    near, far = measure(10), measure(100)
    for title in BESIDE:
        more = [
            [size - other for size, other in zip(chains[title].sizes, chains["nothing"].sizes, strict=True)]
            for chains in (near, far)
        ]
        deltas = " | ".join(f"{sum(sizes[1:]) / (SAVES - 1):,.0f}" for sizes in more)
        rises = ", ".join(f"{100 * max(x[title].rises):+.2f}%" for x in (near, far) if x[title].rises)
        print(f"| {title} | {near[title].raw:,} | {more[0][0]:,} | {deltas} | {rises or '-'} |")


if __name__ == "__main__":
    main()
