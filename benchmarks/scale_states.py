"""States of GPT shapes with AdamW's moments, made by simulated training steps, stored raw for every method to read.

A weight's gradient is noise with a deviation of its row and column, plus a direction that stays; moments start at their
stationary distribution under it, and then real AdamW steps follow, so that moments belong to the weights' steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LEARNING_RATE, BETAS, EPS = 3e-4, (0.9, 0.95), 1e-8
CONTEXT = 1024


@dataclass(frozen=True)
class GPTShapes:
    """Layers, width and vocabulary of a GPT-2 with tied embeddings."""

    layers: int
    width: int
    vocabulary: int = 50257

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters."""
        width = self.width
        yield "wte.weight", (self.vocabulary, width)
        yield "wpe.weight", (CONTEXT, width)
        for layer in range(self.layers):
            for name, outputs, inputs in (
                ("attn.qkv", 3 * width, width),
                ("attn.proj", width, width),
                ("mlp.up", 4 * width, width),
                ("mlp.down", width, 4 * width),
            ):
                yield f"h.{layer}.{name}.weight", (outputs, inputs)
                yield f"h.{layer}.{name}.bias", (outputs,)
            for norm in ("norm1", "norm2"):
                yield f"h.{layer}.{norm}.weight", (width,)
                yield f"h.{layer}.{norm}.bias", (width,)
        yield "norm.weight", (width,)
        yield "norm.bias", (width,)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(torch.Size(shape).numel() for _, shape in self.shapes())


MODELS = {
    "tiny": GPTShapes(2, 64, vocabulary=1000),  # for tests
    "1M": GPTShapes(4, 128, vocabulary=1000),  # 52 tensors: what a save costs beside the state's bytes
    "12M": GPTShapes(4, 192),
    "30M": GPTShapes(6, 384),
    "40M": GPTShapes(6, 480),
    "124M": GPTShapes(12, 768),
    "350M": GPTShapes(24, 1024),
    "1.5B": GPTShapes(48, 1600),
}


class Weight:
    """One parameter in training: its value, its moments, and the distribution of its gradient, where `generator` is."""

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=generator.device)

        self._generator = generator
        self._scale = 1e-4 * (normal(shape[0]).exp() if len(shape) > 0 else torch.ones((), device=generator.device))
        if len(shape) > 1:
            self._scale = self._scale[:, None] * normal(shape[1]).mul(0.5).exp()
        self._direction = normal(*shape).mul_(0.2)
        self.value = normal(*shape).mul_(0.02) if len(shape) > 1 else torch.ones(shape, device=generator.device)
        beta1, beta2 = BETAS
        spread = ((1 - beta1) / (1 + beta1)) ** 0.5, (2 * (1 - beta2) / (1 + beta2)) ** 0.5
        self.moment1 = (normal(*shape).mul_(spread[0]) + self._direction).mul_(self._scale)
        self.moment2 = normal(*shape).mul_(spread[1]).add_(1).clamp_(min=0.05).mul_(self._scale**2)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Value and moments by kind and name (`exp_avg.norm.weight`), which change in place."""
        return {f"value.{name}": self.value, f"exp_avg.{name}": self.moment1, f"exp_avg_sq.{name}": self.moment2}

    def advance(self, steps: int) -> None:
        """AdamW steps with fresh gradients."""
        for _ in range(steps):
            gradient = torch.randn(self.value.shape, generator=self._generator, device=self.value.device)
            gradient.add_(self._direction).mul_(self._scale)
            self.moment1.lerp_(gradient, 1 - BETAS[0])
            self.moment2.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            self.value.mul_(1 - LEARNING_RATE * 0.1)
            self.value.addcdiv_(self.moment1, self.moment2.sqrt().add_(EPS), value=-LEARNING_RATE)


def training_states(shapes: GPTShapes, saves: int, steps: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """States, `steps` training steps apart: values and moments by kind and name (`exp_avg.norm.weight`)."""
    states: list[dict[str, Tensor]] = [{} for _ in range(saves)]
    for index, (name, shape) in enumerate(shapes.shapes()):
        weight = Weight(shape, torch.Generator().manual_seed(seed * 1_000_003 + index))
        for number, state in enumerate(states):
            weight.advance(0 if number == 0 else steps)
            state |= {key: tensor.clone() for key, tensor in weight.tensors(name).items()}
    return states


def state_dicts(shapes: GPTShapes, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state dicts of a model and its AdamW that hold these tensors."""
    names = [name for name, _ in shapes.shapes()]
    slots = {
        index: {
            "step": torch.tensor(1000.0),
            "exp_avg": tensors[f"exp_avg.{name}"],
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
        }
        for index, name in enumerate(names)
    }
    group = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": 0.1, "params": list(slots)}
    model = {name: tensors[f"value.{name}"] for name in names}
    return {"model": model, "optimizer": {"state": slots, "param_groups": [group]}}


def make_states(folder: Path, model: str, saves: int, steps: int, seed: int = 0) -> None:
    """Write `saves` states, `steps` training steps apart, as `folder`/0.safetensors and so on, unless they exist."""
    done = folder / "states.json"
    settings = {"model": asdict(MODELS[model]), "saves": saves, "steps": steps, "seed": seed, "version": 1}
    if done.exists() and json.loads(done.read_text()) == settings:
        return
    folder.mkdir(parents=True, exist_ok=True)
    states = training_states(MODELS[model], saves, steps, seed)
    for number, state in enumerate(states):
        save_file(state, folder / f"{number}.safetensors")
    done.write_text(json.dumps(settings))


class StateHolder:
    """Has a state dict."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("nothing is restored here")


class LiveState:
    """A model's and an optimizer's state dict in memory, whose values are those of one stored state after another."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "0.safetensors").items()}
        self._tensors, self.state = tensors, state_dicts(MODELS[model], tensors)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    @property
    def objects(self) -> dict[str, Any]:
        """The model and the optimizer, as far as a manager asks for them."""
        return {name: StateHolder(state) for name, state in self.state.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of weights and moments, in one dict."""
        return self._tensors

    def load(self, number: int) -> None:
        """Take the values of a stored state, in place."""
        for name, tensor in load_file(self._folder / f"{number}.safetensors").items():
            self._tensors[name].copy_(tensor)
