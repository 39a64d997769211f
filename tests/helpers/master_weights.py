"""Layers of one shape in any order, and an optimizer that keeps what torch would cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYERS = ("a", "b", "c")


class MasterAdam(torch.optim.Optimizer):
    """Weights and moments in float32 beside weights of any dtype, and codes, counts and a history."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                if not slots:
                    slots |= {"master": parameter.float(), "codes": torch.zeros(3, dtype=torch.uint8)}
                    slots |= {"count": torch.zeros(()), "history": [], "pair": (torch.ones(2, dtype=torch.float64),)}
                    slots["nested"] = {"half": torch.full((2,), 0.1, dtype=torch.float16)}
                slots["count"] += 1001 / 3
                slots["codes"] += 7
                slots["history"] = [*slots["history"], parameter.grad.float() / 3][-2:]
                slots["master"] -= group["lr"] * parameter.grad.float()
                parameter.copy_(slots["master"])


class Layers(nn.ModuleDict):
    """Layers that are declared in an order of one's own and called in the same one."""

    def __init__(self, layers: tuple[str, ...] = LAYERS, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(len(layers))
        super().__init__({name: nn.Linear(4, 4) for name in layers})
        self.to(dtype)

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        for name in sorted(self):
            x = self[name](x.to(next(self.parameters()).dtype)).tanh()
        return {"loss": (x - 0.5).square().mean()}


def groups(model: nn.Module, names: tuple[str, ...] = LAYERS) -> list[dict[str, Any]]:
    """A group of each layer, with a learning rate of its own."""
    layers: Any = model.module if isinstance(model, nn.DataParallel) else model
    return [{"params": list(layers[name].parameters()), "lr": 0.1 * (1 + LAYERS.index(name))} for name in names]


def slots_by_name(model: nn.Module, *optimizers: Any) -> dict[str, Any]:
    """What optimizers keep of each parameter, and its learning rate."""
    names = {id(parameter): name.replace("module.", "") for name, parameter in model.named_parameters()}
    slots = {
        names[id(parameter)]: (dict(optimizer.state.get(parameter, {})), group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return dict(sorted(slots.items()))


def plain_values(value: Any) -> Any:
    """A nest with dtype, shape and values in place of its tensors."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: plain_values(member) for key, member in value.items()}
    return [plain_values(member) for member in value] if isinstance(value, list | tuple) else value
