"""Promise: what an optimizer keeps comes back to its parameter and in its dtype, or the restore is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.master_weights import LAYERS, Layers, MasterAdam, groups, plain_values, slots_by_name
from helpers.parameters import each_value
from helpers.strategies import same
from torch import Tensor, nn
from torch.optim import lr_scheduler

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.train import CheckpointManager


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    for seed in range(steps):
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(100 * seed + index)
            if parameter.requires_grad:
                grad = torch.randn(parameter.shape, generator=generator) + len(name.replace("module.", ""))
                parameter.grad = grad.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()


CHANGES: dict[str, Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]]] = {}


def change(function: Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]]) -> None:
    CHANGES[function.__name__] = function


@change
def layers_in_another_order() -> Any:
    model = Layers(("c", "a", "b"))
    return model, [torch.optim.Adam(groups(model))]


@change
def groups_swapped() -> Any:
    model = Layers()
    return model, [torch.optim.Adam(groups(model, ("b", "c", "a")))]


@change
def parameters_of_a_group_swapped() -> Any:
    model = Layers()
    return model, [torch.optim.Adam([{**group, "params": group["params"][::-1]} for group in groups(model)])]


@change
def wrapped() -> Any:
    model = nn.DataParallel(Layers())
    return model, [torch.optim.Adam(groups(model, ("c", "b", "a")))]


@pytest.mark.parametrize("name", CHANGES)
def test_moments_and_rates_follow_the_names_of_parameters(tmp_path: Path, name: str) -> None:
    model = Layers()
    optimizer = torch.optim.Adam(groups(model))
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer)
    schedule.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer, scheduler=schedule)
    other, [other_optimizer] = CHANGES[name]()
    other_schedule = lr_scheduler.LambdaLR(other_optimizer, lambda step: 0.5**step)
    result = CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer, scheduler=other_schedule)
    assert result is not None and not result.missing_keys and not result.unexpected_keys
    assert same(slots_by_name(model, optimizer), slots_by_name(other, other_optimizer))
    schedule.step(), other_schedule.step()
    train(model, optimizer)
    train(other, other_optimizer)
    assert same(slots_by_name(model, optimizer), slots_by_name(other, other_optimizer))


@pytest.mark.parametrize("nest", [list, lambda parts: dict(zip("xyz", parts, strict=True))], ids=["list", "dict"])
def test_optimizers_of_a_nest_are_found_by_their_parameters(tmp_path: Path, nest: Any) -> None:
    def build(names: tuple[str, ...]) -> Any:
        model = Layers()
        optimizers = [torch.optim.SGD([group], lr=1.0, momentum=0.9) for group in groups(model, names)]
        return model, optimizers, [lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]

    model, optimizers, schedules = build(LAYERS)
    train(model, *optimizers)
    schedules[0].step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=nest(optimizers), scheduler=nest(schedules))
    for reverse_schedules in (False, True):
        other, reversed_optimizers, others = build(LAYERS[::-1])
        order = others if reverse_schedules else others[::-1]
        arguments = {"optimizer": nest(reversed_optimizers), "scheduler": nest(order)}
        CheckpointManager(tmp_path).restore(model=other, **arguments)
        assert same(slots_by_name(model, *optimizers), slots_by_name(other, *reversed_optimizers))
        assert [one.state_dict() for one in schedules] == [one.state_dict() for one in others[::-1]]


def test_parameters_that_name_themselves_keep_their_names(tmp_path: Path) -> None:
    model, other = Layers(), Layers(("c", "b", "a"))
    optimizer, other_optimizer = (torch.optim.Adam(one.named_parameters()) for one in (model, other))
    train(model, optimizer)
    names = other_optimizer.param_groups[0]["param_names"]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
        manager.save(2, optimizer=optimizer)  # its own names alone
    for step, models in ((1, {"model": other}), (2, {})):
        other_optimizer = torch.optim.Adam(other.named_parameters())
        CheckpointManager(tmp_path).restore(step, **models, optimizer=other_optimizer)
        assert same(slots_by_name(model, optimizer), slots_by_name(other, other_optimizer))
        assert other_optimizer.param_groups[0]["param_names"] == names
    plain = torch.optim.Adam(other.parameters())
    CheckpointManager(tmp_path).restore(1, model=other, optimizer=plain)
    assert "param_names" not in plain.param_groups[0]


def test_several_models_with_equal_names(tmp_path: Path) -> None:
    def build(reverse: bool) -> Any:
        models = {"g": Layers(), "d": Layers()}
        parameters = [one for name in sorted(models, reverse=reverse) for one in models[name].parameters()]
        return models, torch.optim.Adam(parameters)

    (models, optimizer), (others, other_optimizer) = build(False), build(True)
    train(models["g"], optimizer)
    train(models["d"], optimizer, steps=5)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=models, optimizer=optimizer)
    CheckpointManager(tmp_path).restore(model=others, optimizer=other_optimizer)
    for name in models:
        pairs = zip(models[name].parameters(), others[name].parameters(), strict=True)
        assert all(same(optimizer.state[one], other_optimizer.state[two]) for one, two in pairs)


class Tied(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            setattr(self, name, nn.Linear(4, 4, bias=False))
        getattr(self, second).weight = getattr(self, first).weight
        self.last = nn.Linear(4, 4, bias=False)


def test_a_tied_parameter_has_any_of_its_names(tmp_path: Path) -> None:
    model, other = Tied("head", "embed"), Tied("embed", "head")
    optimizer = torch.optim.Adam(model.parameters())
    other_optimizer = torch.optim.Adam([other.last.weight, other.embed.weight])
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer)
    for one, two in ((model.head, other.head), (model.last, other.last)):
        assert same(optimizer.state[one.weight], other_optimizer.state[two.weight])


def test_parameters_outside_of_all_models_keep_their_order(tmp_path: Path) -> None:
    def build(order: tuple[str, ...]) -> Any:
        model, loose = Layers(order), [nn.Parameter(torch.zeros(4)) for _ in range(2)]
        return model, loose, torch.optim.Adam([*loose, *model.parameters()])

    (model, loose, optimizer), (other, other_loose, other_optimizer) = build(LAYERS), build(LAYERS[::-1])
    for value, parameter in enumerate(loose):
        parameter.grad = torch.full((4,), value + 1.0)
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer)
    pairs = [*zip(loose, other_loose, strict=True), (model["a"].weight, other["a"].weight)]
    assert all(same(optimizer.state[one], other_optimizer.state[two]) for one, two in pairs)


def test_names_that_do_not_match_are_refused_or_begin_afresh(tmp_path: Path) -> None:
    model, other = Layers(), Layers()
    optimizer, other_optimizer = (
        torch.optim.Adam(one[name].parameters()) for one, name in ((model, "a"), (other, "b"))
    )
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(MismatchError, match=r"'model/b\.weight'.*'model/a\.weight'"):
        CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, other.parameters(), strict=True))
    result = CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer, strict=False)
    assert result is not None and not any(other_optimizer.state.values())
    assert result.missing_keys == ("optimizer/model/b.weight", "optimizer/model/b.bias")
    assert result.unexpected_keys == ("optimizer/model/a.weight", "optimizer/model/a.bias")
    train(other, other_optimizer)


@pytest.mark.parametrize("strict", [True, False])
def test_members_of_two_groups_in_one_are_refused(tmp_path: Path, strict: bool) -> None:
    model, other = Layers(), Layers()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=torch.optim.Adam(groups(model)))
    first, second, third = groups(other)
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]
    with pytest.raises(MismatchError, match="the same members"):
        CheckpointManager(tmp_path).restore(
            model=other, optimizer=torch.optim.Adam([first, second, third]), strict=strict
        )


def test_one_history_of_all_parameters_needs_their_order(tmp_path: Path) -> None:
    model, other = Layers(), Layers(LAYERS[::-1])
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: _loss(model))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    with pytest.raises(MismatchError, match="in another order"):
        CheckpointManager(tmp_path).restore(model=other, optimizer=torch.optim.LBFGS(other.parameters()))


def _loss(model: nn.Module) -> float:
    loss = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    model.zero_grad()
    loss.backward()
    return loss.item()


def test_a_part_brings_the_moments_of_its_own_parameters(tmp_path: Path) -> None:
    model, other = Layers(), nn.DataParallel(Layers(LAYERS[::-1]))
    optimizer, other_optimizer = (torch.optim.Adam(one.parameters()) for one in (model, other))
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer, only=["module.a.*"])
    assert torch.equal(model["a"].weight, other.module["a"].weight)
    assert same(optimizer.state[model["a"].weight], other_optimizer.state[other.module["a"].weight])
    assert not torch.equal(model["b"].weight, other.module["b"].weight)


def test_a_part_of_which_no_moments_were_saved_begins_afresh(tmp_path: Path) -> None:
    model, other = Layers(), Layers()
    optimizer = torch.optim.Adam(model["a"].parameters())
    other_optimizer = torch.optim.Adam([*other["b"].parameters(), *other["a"].parameters()])
    train(model, optimizer)
    train(other, other_optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer, only=["a.*", "b.*"])
    assert same(optimizer.state[model["a"].weight], other_optimizer.state[other["a"].weight])
    assert not other_optimizer.state[other["b"].weight]


def test_the_name_of_the_names_is_taken(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="parameter_names"):
        CheckpointManager(tmp_path).save(1, parameter_names=Layers())


# dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_optimizer_keeps_comes_back_in_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = Layers(dtype=dtype), Layers(LAYERS[::-1], dtype)
    optimizer, other_optimizer = MasterAdam(model.parameters()), MasterAdam(other.parameters())
    train(model, optimizer, steps=3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    seen: list[Any] = []
    other_optimizer.register_load_state_dict_post_hook(
        lambda live: seen.append(live.state[other["a"].weight]["master"].dtype)
    )
    CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer)
    assert seen == [torch.float32]  # hooks see what was saved
    assert plain_values(slots_by_name(model, optimizer)) == plain_values(slots_by_name(other, other_optimizer))
    assert isinstance(other_optimizer.state[other["a"].weight]["pair"], tuple)
    train(model, optimizer)
    train(other, other_optimizer)
    assert plain_values(slots_by_name(model, optimizer)) == plain_values(slots_by_name(other, other_optimizer))


@pytest.mark.parametrize("with_model", [True, False])
def test_moments_narrower_than_their_weights_stay_so(tmp_path: Path, with_model: bool) -> None:
    model = Layers()
    optimizer = MasterAdam(model.parameters())
    train(model, optimizer)
    for slots in optimizer.state.values():
        slots["master"] = slots["master"].bfloat16()
    models = {"model": model} if with_model else {}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, **models, optimizer=optimizer)
    other = MasterAdam(model.parameters())
    CheckpointManager(tmp_path).restore(**models, optimizer=other)
    assert plain_values(slots_by_name(model, optimizer)) == plain_values(slots_by_name(model, other))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_moments_of_a_model_in_another_dtype_follow_it(tmp_path: Path, kind: Any) -> None:
    model, other = Layers(dtype=torch.bfloat16), Layers()
    optimizer, other_optimizer = kind(model.parameters()), kind(other.parameters())
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        pairs = {key: (value, other_optimizer.state[two][key]) for key, value in optimizer.state[one].items()}
        for saved, restored in pairs.values():
            assert restored.dtype == (torch.float32 if saved.dim() else saved.dtype)
            assert torch.equal(saved.float(), restored.float())
    train(other, other_optimizer)


# wrappers, and keys that only one side has


@pytest.mark.parametrize(
    ("wrapper", "strict", "wrap_saved"),
    each_value(["parallel", "compiled", "both", "inner", "checkpointed"], [True, False], [True, False]),
)
def test_a_wrapper_on_either_side_changes_nothing(tmp_path: Path, wrapper: str, strict: bool, wrap_saved: bool) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def build(is_wrapped: bool, order: tuple[str, ...]) -> tuple[nn.Module, nn.Module, Any]:
        inner: Any = nn.Sequential(Layers(order), nn.BatchNorm1d(4))
        model: Any = inner
        if is_wrapped and wrapper in ("compiled", "both"):
            model = torch.compile(model, backend="eager")
        if is_wrapped and wrapper in ("parallel", "both"):
            model = nn.DataParallel(model)
        if is_wrapped and wrapper == "inner":
            inner[0]["a"] = torch.compile(nn.DataParallel(inner[0]["a"]), backend="eager")
        if is_wrapped and wrapper == "checkpointed":
            inner[0]["a"] = checkpoint_wrapper(inner[0]["a"])
        return model, inner, torch.optim.Adam(model.parameters())

    def plain(inner: Any) -> list[Tensor]:
        layer = getattr(getattr(inner[0]["a"], "_orig_mod", inner[0]["a"]), "module", inner[0]["a"])
        return [layer.weight, inner[0]["b"].weight, inner[1].weight]

    model, inner, optimizer = build(wrap_saved, LAYERS)
    other, other_inner, other_optimizer = build(not wrap_saved, LAYERS[::-1])
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    result = CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer, strict=strict)
    assert result is not None and not result.missing_keys and not result.unexpected_keys
    for one, two in zip(plain(inner), plain(other_inner), strict=True):
        assert torch.equal(one, two) and same(optimizer.state[one], other_optimizer.state[two])


def test_keys_that_only_one_side_has_are_returned_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = nn.DataParallel(Layers(("a", "b"))), Layers(("b", "c"))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, more={"x": Layers(("a",))})
    result = CheckpointManager(tmp_path).restore(model=other, more={"x": Layers(("a", "b"))}, new=other, strict=False)
    assert result is not None
    assert result.missing_keys == ("c.weight", "c.bias", "more/x/b.weight", "more/x/b.bias", "new")
    assert result.unexpected_keys == ("module.a.weight", "module.a.bias")
    assert torch.equal(model.module["b"].weight, other["b"].weight)
    assert "c.weight" in caplog.text and "module.a.weight" in caplog.text


def test_a_model_that_nothing_was_saved_of_is_a_warning(tmp_path: Path) -> None:
    model, other = Layers(("a",)), Layers(("b",))
    optimizer, other_optimizer = (torch.optim.Adam(one.parameters()) for one in (model, other))
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    with pytest.warns(UserWarning, match="no key of the model"):
        CheckpointManager(tmp_path).restore(model=other, optimizer=other_optimizer, strict=False)
    assert not any(other_optimizer.state.values())
