"""Which weights the predicted rise is wrong for: errors of groups of tensors alone, and of all together.

    python benchmarks/curvature_groups.py --only "vit adamw" --rise 0.01

At three checkpoints of the second half of a training, weights get errors that are uniform in the cells that `fisher`
would give them, as large as costs `--rise` of the loss. Each rise is the mean of that of errors d and of -d, in which a
slope cancels; half the difference is the slope's part ("odd"). N is the rise over 1/2 sum(v d^2).
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import fisher
import torch
import workloads
from lossless_report import table
from torch import Tensor, nn
from workloads import Workload

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.probe import group_by_pattern
from shrinkpoint.schemes.fisher.steps import (
    MAX_STEP_STD,
    SENSITIVE_STEP,
    from_log_step,
    geometric_mean_curvature,
    make_lattice,
    rescale,
    to_log_step,
)

HEAD = ["", "weights", "predicted share", "measured share", "+-", "odd", "N"]


def second_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Mean squared gradients by name of a parameter, without the bias towards zero."""
    names, out = {parameter: name for name, parameter in model.named_parameters()}, {}
    for group in optimizer.param_groups:
        beta = group["betas"][1] if "betas" in group else group["alpha"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            moment = state["exp_avg_sq"] if "exp_avg_sq" in state else state["square_avg"]
            out[names[parameter]] = moment / (1 - beta ** float(state["step"]))
    return out


def uniform_errors(weights: dict[str, Tensor], moments: dict[str, Tensor], log_step: int) -> dict[str, Tensor]:
    """Errors that are uniform in the cells of a keyframe with this step size."""
    means = {name: float(moment.mean()) for name, moment in moments.items()}
    typical = geometric_mean_curvature(means, {name: moment.numel() for name, moment in moments.items()})
    generator, out = torch.Generator().manual_seed(1), {}
    for name, weight in weights.items():
        std = float(weight.std(correction=0)) * (SENSITIVE_STEP if weight.dim() < 2 else 1.0)
        lattice = make_lattice(tuple(weight.shape), Curvature(as_matrix(moments[name])), typical, 0, std)
        if lattice is not None:
            steps = rescale(lattice, log_step, MAX_STEP_STD * std).scales(device="cpu")
            places = torch.rand(as_matrix(weight).shape, generator=generator) - 0.5
            out[name] = (places * steps).reshape(weight.shape)
    return out


class Rises:
    """Measures the rise that errors cause, without and with the part of the slope."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._workload, self._parameters = workload, dict(model.named_parameters())
        self._model = model
        self.weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.base = self._reading()

    def _reading(self) -> Tensor:
        return self._workload.evaluate.reading(self._model).double()  # type: ignore[attr-defined, no-any-return]

    @torch.no_grad()
    def measure(self, errors: dict[str, Tensor]) -> tuple[float, float, float]:
        """(rise, its standard error, odd part)."""
        found = []
        for sign in (1, -1):
            for name, error in errors.items():
                self._parameters[name].copy_(self.weights[name] + sign * error)
            found.append(self._reading() - self.base)
            for name in errors:
                self._parameters[name].copy_(self.weights[name])
        mean, odd = (found[0] + found[1]) / 2, (found[0] - found[1]) / 2
        return float(mean.mean()), float(mean.std()) / math.sqrt(len(mean)), float(odd.mean())


def study(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, share: float) -> list[list[Any]]:
    """The rows of one checkpoint."""
    rises, moments, log_step = Rises(workload, model), second_moments(model, optimizer), 0
    budget = share * float(rises.base.mean())
    for _ in range(6):
        errors = uniform_errors(rises.weights, moments, log_step)
        rise, deviation, odd = rises.measure(errors)
        change = to_log_step(math.sqrt(budget / rise)) if rise > 0 else 8
        if abs(change) <= 2:
            break
        log_step += max(-16, min(16, change))
    terms = {name: float((moments[name] * error.square()).sum()) / 2 for name, error in errors.items()}
    total, groups = sum(terms.values()), dict[str, list[str]]()
    for name in errors:
        groups.setdefault(group_by_pattern({name: rises.weights[name]})[name], []).append(name)
    half = rises.measure({name: error / 2 for name, error in errors.items()})[0]
    cells = [f"{1:.3f}", f"{rise / budget:+.2f} budgets", f"{deviation / budget:.2f}", f"{odd / budget:+.2f}"]
    rows = [[f"all, k = {from_log_step(log_step):.2f}", sum(x.numel() for x in errors.values()), *cells, rise / total]]
    rows.append(["all, half the steps", "", "", "", "", "", 4 * half / total])
    for group, names in groups.items():
        alone, deviation, odd = rises.measure({name: errors[name] for name in names})
        term = sum(terms[name] for name in names)
        cells = [f"{term / total:.3f}", f"{alone / rise:+.3f}", f"{deviation / rise:.3f}", f"{odd / rise:+.2f}"]
        rows.append([group, sum(errors[name].numel() for name in names), *cells, alone / term if term else math.nan])
    return [[*map(str, row[:-1]), f"{row[-1]:.0f}"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--only", nargs="*", default=["vit adamw", "lstm adam", "vae rmsprop"])
    parser.add_argument("--rise", type=float, default=0.01, help="of the loss")
    parser.add_argument("--at", nargs="*", type=int, default=[0, 4, 7], help="which of the eight checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--recordings", type=Path, help="a folder of recorded trainings, which are used again")
    options = parser.parse_args()
    workloads.seed_everything(options.seed, 1)
    for name in options.only:
        workload = workloads.named(name, options.data, quick=options.quick)
        course, half = workload.build(options.seed), workload.steps // 2
        series = fisher.recorded(workload, options.seed, half, half // options.saves, options.saves, options.recordings)
        for step, model, optimizer in (series[place] for place in options.at):
            course.model.load_state_dict(model)
            course.optimizer.load_state_dict(copy.deepcopy(optimizer))
            print(f"\n{name}, step {step}")
            print(table(HEAD, study(workload, course.model, course.optimizer, options.rise)), flush=True)


if __name__ == "__main__":
    main()
