"""The optimizers of `optimizers.py`: torch's own, and those of other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

Optimizers = Mapping[str, Optimizer]


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        name: of the optimizer.
        rate: its learning rate at the peak.
        build: a model and the rate to the optimizers of its parameters, by name.
        package: what must be installed; "" for torch alone.
        is_scheduled: the rate falls linearly after a warm-up; schedule-free optimizers have a constant one.
        sparse: the gradients of the embedding are sparse tensors.
        needs_closure: a step calls the loss again.
        share: of the steps of the other optimizers, for one whose steps take longer.
    """

    name: str
    rate: float
    build: Callable[[nn.Module, float], Optimizers] = field(repr=False)
    package: str = ""
    is_scheduled: bool = True
    sparse: bool = False
    needs_closure: bool = False
    share: float = 1.0

    @property
    def problem(self) -> str:
        """Why it cannot run here; "" if it can."""
        if not self.package:
            return ""
        try:
            importlib.import_module(self.package)
        except ImportError:
            return f"{self.package} is not installed"
        return ""


def alone(kind: Callable[..., Optimizer], **settings: Any) -> Callable[[nn.Module, float], Optimizers]:
    """One optimizer for all parameters."""
    return lambda model, rate: {"optimizer": kind(model.parameters(), lr=rate, **settings)}


def imported(package: str, name: str, **settings: Any) -> Callable[[nn.Module, float], Optimizers]:
    """One optimizer of another package for all parameters."""

    def build(model: nn.Module, rate: float) -> Optimizers:
        kind = getattr(importlib.import_module(package), name)
        return {"optimizer": kind(model.parameters(), lr=rate, **settings)}

    return build


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is one that Muon is for: a matrix that is neither an embedding nor the head."""
    return parameter.ndim == 2 and "blocks" in name


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all other parameters."""
    named = [*model.named_parameters()]
    return [p for n, p in named if is_hidden_matrix(n, p)], [p for n, p in named if not is_hidden_matrix(n, p)]


def muon_and_adamw(model: nn.Module, rate: float) -> Optimizers:
    """Muon on matrices, AdamW on the rest: two optimizers of one run."""
    matrices, rest = split(model)
    return {"muon": optim.Muon(matrices, lr=rate), "adamw": optim.AdamW(rest, lr=rate / 10, betas=(0.9, 0.95))}


def muon_of_pytorch_optimizer(model: nn.Module, rate: float) -> Optimizers:
    """Muon and AdamW as groups of one optimizer."""
    matrices, rest = split(model)
    kind = importlib.import_module("pytorch_optimizer").Muon
    groups = [{"params": matrices, "use_muon": True, "lr": rate}, {"params": rest, "use_muon": False, "lr": rate / 10}]
    return {"optimizer": kind(groups)}


def sparse_adam(model: nn.Module, rate: float) -> Optimizers:
    """SparseAdam on the embedding, AdamW on the rest."""
    rest = [parameter for name, parameter in model.named_parameters() if name != "token.weight"]
    return {"sparse": optim.SparseAdam([model.token.weight], lr=rate), "adamw": optim.AdamW(rest, lr=rate)}


TORCH = (
    Case("Adadelta", 1.0, alone(optim.Adadelta)),
    Case("Adafactor", 2e-2, alone(optim.Adafactor)),
    Case("Adagrad", 1e-2, alone(optim.Adagrad)),
    Case("Adam", 3e-3, alone(optim.Adam)),
    Case("Adam, amsgrad", 3e-3, alone(optim.Adam, amsgrad=True)),
    Case("Adamax", 5e-3, alone(optim.Adamax)),
    Case("AdamW", 3e-3, alone(optim.AdamW, betas=(0.9, 0.95))),
    Case("ASGD", 0.3, alone(optim.ASGD, t0=100)),
    Case("LBFGS", 0.3, alone(optim.LBFGS, max_iter=4, history_size=5), needs_closure=True, share=0.25),
    Case("Muon and AdamW", 2e-2, muon_and_adamw),
    Case("NAdam", 3e-3, alone(optim.NAdam)),
    Case("RAdam", 3e-3, alone(optim.RAdam)),
    Case("RMSprop", 1e-3, alone(optim.RMSprop)),
    Case("RMSprop, momentum", 3e-4, alone(optim.RMSprop, momentum=0.9)),
    Case("RMSprop, centered", 1e-3, alone(optim.RMSprop, centered=True)),
    Case("Rprop", 1e-3, alone(optim.Rprop, step_sizes=(1e-6, 1e-2))),
    Case("SGD", 0.3, alone(optim.SGD)),
    Case("SGD, momentum", 0.05, alone(optim.SGD, momentum=0.9)),
    Case("SparseAdam and AdamW", 3e-3, sparse_adam, sparse=True),
)
OTHERS = (
    Case("Lion", 3e-4, imported("lion_pytorch", "Lion", weight_decay=0.1), "lion_pytorch"),
    Case("SOAP", 3e-3, imported("pytorch_optimizer", "SOAP"), "pytorch_optimizer"),
    Case(
        "Shampoo", 1e-2, imported("pytorch_optimizer", "Shampoo", preconditioning_compute_steps=10), "pytorch_optimizer"
    ),
    Case("Muon, hybrid", 2e-2, muon_of_pytorch_optimizer, "pytorch_optimizer"),
    Case("AdEMAMix", 3e-3, imported("pytorch_optimizer", "AdEMAMix"), "pytorch_optimizer"),
    Case("AdamWScheduleFree", 5e-3, imported("schedulefree", "AdamWScheduleFree"), "schedulefree", is_scheduled=False),
    Case("SGDScheduleFree", 1.0, imported("schedulefree", "SGDScheduleFree"), "schedulefree", is_scheduled=False),
    Case("AdamW8bit", 3e-3, imported("bitsandbytes.optim", "AdamW8bit", min_8bit_size=1024), "bitsandbytes"),
    Case("Lion8bit", 3e-4, imported("bitsandbytes.optim", "Lion8bit", min_8bit_size=1024), "bitsandbytes"),
    Case(
        "Adafactor, transformers",
        3e-3,
        imported("transformers.optimization", "Adafactor", scale_parameter=False, relative_step=False),
        "transformers",
    ),
    Case(
        "Adafactor, transformers, beta1",
        3e-3,
        imported("transformers.optimization", "Adafactor", scale_parameter=False, relative_step=False, beta1=0.9),
        "transformers",
    ),
)
CASES = (*TORCH, *OTHERS)
