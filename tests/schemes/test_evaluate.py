"""Whatever is done while a candidate is measured, afterwards all is as it was."""

from __future__ import annotations

import math
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from helpers.small_training import Digits, Letters, Run, unchanged
from torch import nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.layer_types import EMBEDDING
from shrinkpoint.schemes import ModelEvaluator
from shrinkpoint.schemes.evaluate import TrialEvaluator, strip_wrapper_prefix
from shrinkpoint.tensors.flat_state import flatten


def flat_of(model: nn.Module):
    return flatten({"model": model.state_dict(), "extra": {"loose.weight": torch.ones(3)}})


def target(model, evaluate) -> ModelEvaluator:
    return ModelEvaluator(flat_of(model), evaluate, model, "model/")


def train(model):
    model.train()
    model(torch.randn(8, 64))


def draw(model):
    torch.rand(3), random.random(), np.random.rand(2), torch.manual_seed(99)


def load(model):
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})


def assign(model):
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()}, assign=True)


def rebind(model):
    model.body[1].running_mean = model.body[1].running_mean * 2
    model.head.weight = nn.Parameter(torch.zeros(10, 64))
    model.cache.add_(1)


def cast(model):
    model.half()


def learn(model):
    with torch.enable_grad():
        model(torch.randn(8, 64)).sum().backward()
    for one in model.parameters():
        one.data.add_(1)


def clear(model):
    model.zero_grad()


def freeze(model):
    model.requires_grad_(False).eval()


def grow(model):
    model.head.register_buffer("seen", torch.ones(1))
    model.body[0].register_parameter("more", nn.Parameter(torch.ones(1)))


def spoil(model):
    for one in [*model.parameters(), *model.buffers()]:
        one.data.fill_(torch.nan if one.is_floating_point() else 7)


def exchange(model):
    del model.body[1]
    model.head = nn.Linear(64, 10)


def count(model):
    model.passes, model.scale, model.longest = model.passes + 1, model.scale * 2, 9
    model.register_buffer("table", torch.zeros(9), persistent=False)


def parametrize(model):
    nn.utils.parametrizations.weight_norm(model.body[0])


TRICKS = [train, draw, load, assign, rebind, cast, learn, clear, freeze, grow, count, exchange, parametrize, spoil]


def busy() -> Run:
    """A run in the middle of a step: with gradients, and with a buffer that is not saved."""
    run = Run(steps=3)
    run.model.register_buffer("cache", torch.zeros(4), persistent=False)
    run.model.register_buffer("turned", torch.full((4,), 1 + 2j).conj(), persistent=False)
    run.model.register_buffer("minus", torch._neg_view(torch.ones(4)), persistent=False)
    run.model(torch.randn(8, 64)).sum().backward()
    run.model.body[0].bias.requires_grad_(False)
    run.model.head.eval()
    run.model.passes, run.model.scale, run.model.longest = 3, torch.ones(()), 0.5
    return run


def plain_attributes(run: Run) -> dict[str, object]:
    return {name: getattr(run.model, name) for name in ("passes", "scale", "longest")}


@pytest.mark.parametrize(("trick", "error"), each_value(TRICKS, [None, ValueError, KeyboardInterrupt]))
def test_nothing_of_a_measurement_is_left_in_the_model(trick, error):
    run = busy()
    before, addresses, gradients = run.photo(), run.addresses(), [one.grad for one in run.model.parameters()]
    attributes = plain_attributes(run)
    value = {"model/body.0.weight": torch.full((96, 64), 0.5)}

    def evaluate(model):
        assert model is run.model and bool((model.body[0].weight == 0.5).all()) and not torch.is_grad_enabled()
        assert all(one.grad is None for one in model.parameters())
        trick(model)
        if error is not None:
            raise error("stop")
        return 1.0

    measured = target(run.model, evaluate)
    with measured:
        if error is KeyboardInterrupt:
            with pytest.raises(error):
                measured.evaluate(value)
        else:
            reading = measured.evaluate(value)
            assert reading.failure == "ValueError: stop" if error else reading.value == 1.0
        assert unchanged(run, before) and run.addresses() == addresses
    assert unchanged(run, before) and run.addresses() == addresses
    assert all(one.grad is old for one, old in zip(run.model.parameters(), gradients, strict=True))
    assert plain_attributes(run) == attributes
    run.steps(1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_a_model_of_torchscript_is_measured():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with target(model, lambda model: float(model.eval()(torch.eye(4)).sum())) as measured:
        assert measured.evaluate({"model/0.weight": torch.ones(4, 4)}).value == pytest.approx(
            16 + 4 * float(before["0.bias"].sum())
        )
    assert model.training and all(torch.equal(model.state_dict()[name], one) for name, one in before.items())


def test_what_was_interrupted_while_it_was_put_back_is_put_back_at_the_end(monkeypatch):
    run = busy()
    before = run.photo()
    with pytest.raises(KeyboardInterrupt), target(run.model, lambda model: spoil(model) or 1.0) as measured:
        put_back = measured._guard.restore
        calls = iter([KeyboardInterrupt])

        def interrupted():
            for error in calls:
                raise error
            put_back()

        monkeypatch.setattr(measured._guard, "restore", interrupted)
        measured.evaluate({})
    assert unchanged(run, before)


def test_a_state_that_is_not_alive_is_handed_over_with_the_values_in_it():
    model, seen = Digits(), []
    state = {"net": model.state_dict(), "epoch": 3, "note": ("a", None)}
    value = {"net/body.0.weight": torch.full((96, 64), 0.5)}
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def evaluate(nest):
        seen.append(nest)
        assert nest["epoch"] == 3 and nest["note"] == ("a", None) and bool((nest["net"]["body.0.weight"] == 0.5).all())
        model.load_state_dict(nest["net"])  # into the very model that the state came from
        nest["net"]["head.weight"].zero_()
        draw(None)
        return model.body[0].weight.mean()

    random_state = torch.get_rng_state()
    with TrialEvaluator(flatten(state), evaluate) as measured:
        assert measured.evaluate(value).value == 0.5
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state()) and len(seen) == 1


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(0.25), 0.25),
        (torch.tensor(2.0), 2.0),
        (torch.tensor([[3]]), 3.0),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
    ],
)
def test_any_number_will_do(answer, value):
    assert target(Digits(), lambda model: answer).evaluate({}).value == value


@pytest.mark.parametrize(
    "answer", [None, "good", [], torch.ones(3, 2), torch.ones(0), np.ones((3, 2)), {"loss": 1.0}, 1j, nn.Identity()]
)
def test_what_is_no_number_is_a_failure_of_the_reading(answer):
    reading = target(Digits(), lambda model: answer).evaluate({})
    assert "Error" in reading.failure and math.isnan(reading.value) and "return a loss" in reading.advice


def test_an_error_of_evaluate_is_a_failure_of_the_reading():
    def evaluate(model):
        raise RuntimeError("no batches")

    assert target(Digits(), evaluate).evaluate({}).failure == "RuntimeError: no batches"


def test_only_parameters_are_alive():
    model = Digits()
    model.register_buffer("table.weight".replace(".", "_"), torch.ones(70, 70))
    model.body.register_buffer("weight", torch.ones(70, 70))
    found = target(model, lambda model: 0.0)
    assert found.quantizable == {f"model/{name}" for name, _ in model.named_parameters()}
    assert found.state_names == {name: f"model/{name}" for name, _ in model.named_parameters()}


def test_a_tied_weight_is_an_embedding_under_all_of_its_names():
    model = Letters()
    found = target(model, lambda model: 0.0)
    assert found.state_names["wte.weight"] == found.state_names["lm_head.weight"] == "model/wte.weight"
    assert found.layer_types["model/wte.weight"] == EMBEDDING
    assert len(found.quantizable) == 6


def test_of_several_models_every_parameter_is_alive_and_names_that_two_have_are_nobodys():
    models = {"a": Digits(), "b": nn.Sequential(nn.Linear(64, 64)), "more": [nn.Sequential(nn.Linear(64, 64))]}
    state = {"a": models["a"].state_dict(), "b": models["b"].state_dict(), "more": [models["more"][0].state_dict()]}
    flat = flatten({"model": state})
    found = ModelEvaluator(flat, lambda nest: nest["b"][0].weight[0, 0], models, "model/")
    assert {"model/a/body.0.weight", "model/b/0.weight"} < found.quantizable and len(found.quantizable) == 8 + 4
    assert "0.weight" not in found.state_names and found.state_names["head.weight"] == "model/a/head.weight"
    name = next(name for name in found.quantizable if name.startswith("model/b") and name.endswith("weight"))
    with found:
        assert found.evaluate({name: torch.full((64, 64), 7.0)}).value == 7.0
    assert models["b"][0].weight[0, 0] != 7.0


def test_evaluate_gets_a_named_tuple_of_models_as_it_was_passed():
    nest = namedtuple("Nest", "encoder decoder")(nn.Linear(2, 2), nn.Linear(2, 2))
    flat = flatten({"model": {"encoder": nest.encoder.state_dict(), "decoder": nest.decoder.state_dict()}})
    found = ModelEvaluator(flat, lambda models: models.decoder.weight[0, 0], nest, "model/")
    with found:
        assert found.evaluate({}).value == nest.decoder.weight[0, 0]


@pytest.mark.parametrize("name", ["module.a.weight", "_orig_mod.a.weight", "module._orig_mod.a.weight", "a.weight"])
def test_a_wrapped_model_has_the_names_of_the_plain_one(name):
    assert strip_wrapper_prefix(name) == "a.weight"


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_state_dict_that_gives_copies_is_refused(prefix):
    class Copies(Digits):
        def state_dict(self, *args, **kwargs):
            return {prefix + name: x.clone() for name, x in super().state_dict(*args, **kwargs).items()}

    model = Copies()
    with pytest.raises(PolicyError, match="shares memory"):
        target(model, lambda model: 0.0)
    assert ModelEvaluator(flat_of(model), None, model, "model/").quantizable == frozenset()


@pytest.mark.parametrize("model", [None, {}, {"a": {"weight": torch.ones(2)}}, torch.optim.SGD([torch.ones(1)])])
def test_what_is_no_module_cannot_be_evaluated(model):
    with pytest.raises(PolicyError, match=r"model: .*torch.nn.Module"):
        ModelEvaluator(flatten({"model": {"a.weight": torch.ones(2)}}), lambda model: 0.0, model, "model/")
