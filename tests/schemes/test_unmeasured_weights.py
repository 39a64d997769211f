"""A budget says nothing of weights that `evaluate` does not look at: they stay exact, and a warning names them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from helpers.sharded_states import Ranks, cut
from helpers.small_training import Silent
from helpers.strategies import difference
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes.calibration import MAX_ENTRIES, top_level_entries
from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
from shrinkpoint.schemes.influence import InfluenceRecorder
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.global_tensors import ShardLayout
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.train import Checkpointer

SCHEMES: dict[str, Callable[..., Any]] = {
    "fisher": lambda **more: sp.Fisher(budget="1%", **more),
    "fisher by error": lambda **more: sp.Fisher(relative_error=0.3, **more),
    "inshrinkerator": lambda **more: sp.Inshrinkerator(threshold=0.05, **more),
    "qd": lambda **more: sp.QD(threshold=0.05, **more),
    "gobo": lambda **more: sp.GOBO(threshold=0.05, **more),
}
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def loss(net: nn.Module) -> Tensor:
    return (net(X) - X.roll(1, 1)).square().mean(1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


class Pair(nn.Module):
    """Two nets, and a weight of its own, as a Lightning module or a model with its reference has them."""

    def __init__(self, net: nn.Module, ema: nn.Module) -> None:
        super().__init__()
        self.net, self.ema = net, ema
        self.shift = nn.Parameter(torch.randn(64, 64))


class Nets(nn.Module):
    """Two nets in one list."""

    def __init__(self, net: nn.Module, ema: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList([net, ema])


class Adapter(nn.Module):
    """Two adapters, of which one is active."""

    def __init__(self, net: nn.Module, ema: nn.Module) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({"active": net, "reference": ema})


class Adapters(nn.Module):
    """Layers with two adapters each: what nothing measures is no entry, and is spread over the model."""

    def __init__(self, net: nn.Sequential, ema: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapter(net[0], ema[0]), Adapter(net[2], ema[2])])

    def forward(self, x: Tensor) -> Tensor:
        first, second = (layer.adapters["active"] for layer in self.layers)
        return second(nn.functional.gelu(first(x)))


FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Tensor], str]] = {
    "dict": (lambda net, ema: {"net": net, "ema": ema}, lambda model: loss(model["net"]), "model/ema"),
    "list": (lambda net, ema: [ema, net], lambda model: loss(model[1]), "model/0"),
    "module": (Pair, lambda model: loss(model.net) + (X @ model.shift).mean(1).abs() / 99, "model/ema"),
    "module list": (Nets, lambda model: loss(model.nets[0]), r"model/nets\.1"),
    "adapters": (Adapters, loss, r"model/layers\.0\.adapters\.reference\.weight"),
    "read and not counted": (
        Pair,
        lambda model: loss(model.net) + (X @ model.shift).mean(1).abs() / 99 + 0 * loss(model.ema),
        "model/ema",
    ),
}
"""How two nets are put together, what measures the first one, and what the warning names."""


class Training:
    """Two nets, of which the second follows the first one."""

    def __init__(self, form: str = "dict") -> None:
        torch.manual_seed(0)
        self.net, self.ema = mlp(), mlp()
        make, self.measure, self.named = FORMS[form]
        self.model, self.calls = make(self.net, self.ema), 0
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.optimizer.zero_grad()
            loss(self.net).mean().backward()
            self.optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                    slow.lerp_(fast, 0.02)
        return self

    def evaluate(self, model: Any) -> Tensor:
        self.calls += 1
        return self.measure(model)

    def assert_only_ema_is_exact(self, model: Any) -> None:
        """Compare the nest of state dicts that was loaded with both nets, by values: forms have different names."""
        loaded = [*flatten(model).tensors.values()]

        def is_loaded(x: Tensor) -> bool:
            return any(x.shape == y.shape and torch.equal(x, y) for y in loaded)

        assert all(map(is_loaded, self.ema.state_dict().values()))
        assert not any(is_loaded(x) for x in self.net.state_dict().values() if x.dim() > 1)


@pytest.mark.parametrize(("name", "form"), each_value(SCHEMES, FORMS))
def test_weights_that_nothing_measures_stay_exact_in_keyframes_deltas_and_resumed_runs(name, form):
    run, storage = Training(form).steps(20), MemoryStorage()
    manager = sp.CheckpointManager(storage, scheme=SCHEMES[name](evaluate=run.evaluate), keyframe_every=2)
    with pytest.warns(LossWarning, match=f"does not depend on .*{run.named}.* stay exact"):
        report = manager.save(1, model=run.model, optimizer=run.optimizer)
    assert "not measured by evaluate" in report.exact.values() and report.loss_report["chosen"] is not None
    run.assert_only_ema_is_exact(manager.store.load(1)["model"])
    for step in (2, 3):
        with Silent():
            manager.save(step, model=run.steps(5).model, optimizer=run.optimizer)
        run.assert_only_ema_is_exact(manager.store.load(step)["model"])
    manager.close()
    again = Training(form)
    manager = sp.CheckpointManager(storage, scheme=SCHEMES[name](evaluate=again.evaluate))
    manager.restore(model=again.model, optimizer=again.optimizer)
    with Silent():
        manager.save(4, model=again.steps(5).model, optimizer=again.optimizer)
    again.assert_only_ema_is_exact(manager.store.load(4)["model"])


@pytest.mark.parametrize("name", SCHEMES)
def test_bare_state_is_exact_where_evaluate_does_not_look(tmp_path, name):
    run = Training().steps(10)
    state = {part: net.state_dict() for part, net in (("net", run.net), ("ema", run.ema))}
    live, other = mlp(), mlp()

    def evaluate(values: Any) -> Tensor:
        live.load_state_dict(values["net"])
        other.load_state_dict(values["ema"])
        return loss(live)

    with pytest.warns(LossWarning, match="evaluate does not depend on ema,"):
        sp.save(state, tmp_path / "a", scheme=SCHEMES[name](evaluate=evaluate))
    loaded = sp.load(tmp_path / "a")
    assert difference(copy.deepcopy(state["ema"]), loaded["ema"]) is None
    assert not torch.equal(loaded["net"]["0.weight"], state["net"]["0.weight"])


@pytest.mark.parametrize("background", [False, True])
def test_saves_that_measure_nothing_keep_the_finding(tmp_path, background):
    run = Training().steps(20)
    for first in (1, 3):  # the second time the finding is read from the manifest
        scheme = sp.Fisher(budget="1%", evaluate=run.evaluate, evaluate_every=None)
        with Checkpointer(scheme=scheme, background=background) as saver:
            if first > 1:
                saver.load(tmp_path / "2")
            for step in (first, first + 1):
                state = {"model": {"net": run.net.state_dict(), "ema": run.ema.state_dict()}}
                state["optimizer"] = run.optimizer.state_dict()
                with pytest.warns(LossWarning) if step == 1 else Silent():
                    saver.save(tmp_path / str(step), state, objects={"model": run.model})
                    report = saver.wait()
                assert report.loss_report["measured"] is (step == 1) and report.loss_report["unmeasured"]
                run.assert_only_ema_is_exact(sp.load(tmp_path / str(step))["model"])
                run.steps(5)


def numpy_loss(net: nn.Module) -> Tensor:
    """The loss, from numbers that were taken out of torch on the way, so that no weight can be followed to it."""
    return torch.from_numpy(loss(net).numpy().copy())


@pytest.mark.filterwarnings("ignore:evaluate does not depend on")
@pytest.mark.parametrize(
    ("measure", "model", "costs"),
    [
        (lambda net: net(X).square().mean(1), lambda run: run.net[0], [2, 3, 2]),
        (loss, lambda run: run.net, [2, 3, 2]),
        (lambda model: loss(model["net"]) + loss(model["ema"]), lambda run: run.model, [2, 3, 2]),
        (lambda net: loss(net).mean(), lambda run: run.net, [3, 2, 2]),
        (lambda model: loss(model["net"]), lambda run: run.model, [5, 2, 2]),
        (numpy_loss, lambda run: run.net, [6, 2, 2]),
    ],
    ids=["one layer", "two layers", "two nets", "one number", "two nets, one measured", "not followed"],
)
def test_weights_that_cannot_be_followed_to_the_answer_cost_evaluations_once_a_run(measure, model, costs):
    run, found = Training().steps(20), []
    run.measure = measure
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(relative_error=0.3, evaluate=run.evaluate)) as manager:
        for step in (1, 2, 3):
            calls = run.calls
            manager.save(step, model=model(run), optimizer=run.steps(1).optimizer)
            found.append(run.calls - calls)
    # Always the state itself and the result. Where no examples can be compared, or a weight cannot be followed: the
    # state again. A weight that cannot be followed: clearly other weights, those that were not read, each entry.
    assert found == costs


class Sums:
    """A function of two weights as an evaluation may compute it, with a look at both of them."""

    @staticmethod
    def copied(first: Tensor, second: Tensor) -> float:
        copies = copy.deepcopy([nn.Parameter(first), nn.Parameter(second)])
        return float(copies[0].detach().sum())

    @staticmethod
    def logged(first: Tensor, second: Tensor) -> float:
        assert float(second.sum()) != 0
        return float(first.sum())

    @staticmethod
    def times_zero(first: Tensor, second: Tensor) -> float:
        return float(first.sum() + second.sum() * 0.0 + torch.tensor(0.0) * second.sum())

    @staticmethod
    def in_freed_memory(first: Tensor, second: Tensor) -> float:
        del second
        return float(first.sum() * np.ones(1, np.float32)[0])

    @staticmethod
    def into_a_buffer(first: Tensor, second: Tensor) -> float:
        buffer = torch.zeros(2, 64)
        buffer[0].copy_(first[0])
        return float(buffer.mean())

    @staticmethod
    def into_a_used_buffer(first: Tensor, second: Tensor) -> float:
        buffer = second.clone()
        buffer.copy_(first)
        return float(buffer.mean())

    @staticmethod
    def into_the_other(first: Tensor, second: Tensor) -> float:
        second.copy_(first)
        return float(second.mean())

    @staticmethod
    def as_output(first: Tensor, second: Tensor) -> float:
        return float(torch.add(first, 1, out=second).sum())

    @staticmethod
    def by_shape(first: Tensor, second: Tensor) -> float:
        return float((first + torch.ones_like(second) + second.new_zeros(64)).sum())

    @staticmethod
    def times_zeros(first: Tensor, second: Tensor) -> float:
        return float((first + second * torch.zeros(64)).sum())

    @staticmethod
    def where_none(first: Tensor, second: Tensor) -> float:
        mask = torch.ones(64, dtype=torch.bool)
        return float((torch.where(mask, first, second) + second.masked_fill(mask, 0)).sum())

    @staticmethod
    def of_no_rows(first: Tensor, second: Tensor) -> float:
        sums = torch.zeros(64)
        for expert, rows in ((first, torch.arange(64)), (second, torch.arange(0))):
            sums.index_add_(0, rows, expert[rows].sum(1))
        return float(sums.sum())

    @staticmethod
    def of_replaced_rows(first: Tensor, second: Tensor) -> float:
        buffer = second.clone()
        buffer[torch.arange(64)] = first
        buffer[:32], buffer[32:] = first[:32], first[32:]
        return float(buffer.sum())

    @staticmethod
    def behind_nothing(first: Tensor, second: Tensor) -> float:
        return float((torch.cat([torch.zeros(0), first]) + second[:0].sum())[:32].sum())

    @staticmethod
    def in_inference_mode(first: Tensor, second: Tensor) -> float:
        with torch.inference_mode():
            return float(first.to(torch.float64).reshape(-1).type_as(second).sum())

    @staticmethod
    def of_batches(first: Tensor, second: Tensor) -> float:
        return sum(float(rows.mean()) for rows in first.split(16)) / 4

    @staticmethod
    def of_a_smaller_last_batch(first: Tensor, second: Tensor) -> float:
        assert bool(second.isfinite().all())
        return sum(float(rows.square().mean()) * len(rows) for rows in first.split(15)) / 64

    @staticmethod
    def of_counts(first: Tensor, second: Tensor) -> float:
        return sum(int((rows > 0).sum()) for rows in first.split(15)) / 4096

    @staticmethod
    def under_a_fake_mode(first: Tensor, second: Tensor) -> float:
        with FakeTensorMode() as mode:
            mode.from_tensor(second) * torch.tensor(2.0)
        return float(first.sum())

    @staticmethod
    def of_a_collective(first: Tensor, second: Tensor) -> float:
        return float(AsyncCollectiveTensor(first + 1).sum())


class Parts:
    """A function of a part of what is computed from two weights, or of numbers that nobody followed."""

    @staticmethod
    def of_a_product(first: Tensor, second: Tensor) -> float:
        return float((torch.stack([first.sum(), second.sum()]) * torch.tensor([1.0, 0.0])).sum())

    @staticmethod
    def of_a_matrix_product(first: Tensor, second: Tensor) -> float:
        return float(torch.stack([first.sum(), second.sum()]) @ torch.tensor([1.0, 0.0]))

    @staticmethod
    def of_joined_rows(first: Tensor, second: Tensor) -> float:
        return float((torch.cat([first, second]) + 1)[:64].sum())

    @staticmethod
    def of_a_buffer(first: Tensor, second: Tensor) -> float:
        buffer = torch.zeros(2, 64)
        buffer[0], buffer[1] = first[0], second[0]
        return float(buffer[0].sum())

    @staticmethod
    def of_a_lost_part(first: Tensor, second: Tensor) -> float:
        lost = torch.stack([second, first])[1]
        return float(torch.stack([second, lost])[1].sum())

    @staticmethod
    def of_rows_without_a_mask(first: Tensor, second: Tensor) -> float:
        mask = torch.arange(64)[:, None] < 32
        return float((first * mask + second * ~mask)[:32].sum())

    @staticmethod
    def of_padded_rows(first: Tensor, second: Tensor) -> float:
        return float(torch.nn.functional.pad(first, (0, 0, 32, 0))[:32].sum())

    @staticmethod
    def of_nested_rows(first: Tensor, second: Tensor) -> float:
        return float((torch.nested.nested_tensor([first[:3], first[3:]], layout=torch.jagged) * 2).values().sum())

    @staticmethod
    def that_is_larger(first: Tensor, second: Tensor) -> float:
        return float(torch.stack([first.sum() + 1e6, second.sum()]).max())

    @staticmethod
    def of_many(first: Tensor, second: Tensor) -> float:
        torch._foreach_copy_([second], [first])
        return float(torch._foreach_add([second, second.clone()], 1)[0].sum())

    @staticmethod
    def numpy(first: Tensor, second: Tensor) -> float:
        assert float(second.sum()) != 0
        return float(first.numpy().sum())

    @staticmethod
    def numpy_of_all(first: Tensor, second: Tensor) -> float:
        assert float(second.sum()) + float(first.square().sum()) != 0
        return float(first.numpy().sum())


def record(function: Callable[[Tensor, Tensor], float]) -> InfluenceRecorder:
    """What a function of two weights reads, and what its answer is computed from."""
    first, second = torch.randn(64, 64), torch.randn(64, 64)
    with InfluenceRecorder({"first": [first], "second": [second]}) as recorder:
        answer = function(first, second)
    recorder.note_answer(answer)
    return recorder


@pytest.mark.parametrize("function", [name for name in vars(Sums) if not name.startswith("_")])
def test_only_weights_that_the_answer_is_computed_from_have_an_influence(function):
    recorder = record(getattr(Sums, function))
    assert recorder.influential_names == {"first"} <= recorder.read_names


@pytest.mark.parametrize("function", [name for name in vars(Parts) if not name.startswith("_")])
def test_weights_are_lost_where_elements_of_them_may_be_passed_over(function):
    recorder = record(getattr(Parts, function))
    assert not recorder.influential_names and "first" in recorder.read_names


def test_what_is_compiled_is_compiled_and_run_while_weights_are_followed():
    net, calls = mlp(), list[str]()

    def backend(graph: Any, _: Any) -> Any:
        calls.append("compiled")
        return lambda *args: (calls.append("ran"), graph(*args))[1]

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with InfluenceRecorder({name: [x] for name, x in net.state_dict().items()}) as recorder, torch.no_grad():
        answer = float(loss(compiled).mean())
    recorder.note_answer(answer)
    with torch.no_grad():
        assert float(loss(compiled).mean()) == answer
    assert calls == ["compiled", "ran", "ran"] and recorder.influential_names == {*net.state_dict()}


def test_weights_are_lost_in_code_that_torch_has_written(monkeypatch):
    net = mlp()
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.compile_tasks.c0", None)
    with InfluenceRecorder({name: [x] for name, x in net.state_dict().items()}) as recorder, torch.no_grad():
        answer = float(loss(net).mean())
    recorder.note_answer(answer)
    assert not recorder.influential_names and recorder.read_names


def test_freed_tensors_are_forgotten():
    weight = torch.randn(64, 64)
    with InfluenceRecorder({"weight": [weight]}) as recorder:
        for _ in range(5000):
            answer = float(weight[:2].sum())
    recorder.note_answer(answer)
    assert recorder.influential_names == {"weight"} and len(recorder._written) < 4500


@pytest.mark.parametrize("measure", ["in a thread", "joined"])
def test_entries_are_tried_where_following_them_says_nothing(measure):
    run = Training().steps(20)

    def in_a_thread(model: Any) -> float:
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(lambda: float(loss(model["net"].requires_grad_(False)).mean())).result()
        assert float(loss(model["ema"]).mean()) > 0
        return answer

    def joined(model: Any) -> Tensor:
        both = torch.cat([model["net"](X), model["ema"](X)], 1)
        return (both[:, :64] - X.roll(1, 1)).square().mean(1)

    run.measure = in_a_thread if measure == "in a thread" else joined
    scheme = sp.Fisher(budget="5%", evaluate=run.evaluate)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, pytest.warns(LossWarning, match="model/ema"):
        report = manager.save(1, model=run.model, optimizer=run.optimizer)
    assert len(report.loss_report["unmeasured"]) == 4
    run.assert_only_ema_is_exact(manager.store.load(1)["model"])


def test_parts_of_a_flat_buffer_cannot_be_told_apart():
    flat = torch.randn(2, 64, 64)
    with InfluenceRecorder({"first": [flat[0]], "second": [flat[1]], "empty": [torch.zeros(0)]}) as recorder:
        answer = float(flat[0].sum() + torch.zeros(0).sum())
    recorder.note_answer(answer)
    assert not recorder.influential_names and recorder.read_names == {"first", "second"}


def test_both_weights_of_a_sum_have_an_influence_through_views_copies_and_modules():
    net = mlp()
    live = mlp()
    with InfluenceRecorder({name: [x] for name, x in net.state_dict().items()}) as recorder, torch.no_grad():
        live.load_state_dict(net.state_dict())
        each = [float(part) for part in loss(live).chunk(4)[0]]
    recorder.note_answer(sum(each) / len(each))
    assert len(each) > 1
    assert recorder.influential_names == {*net.state_dict()}


def test_weight_behind_a_zero_is_measured():
    run, gate = Training(), nn.Linear(64, 64)
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)
    run.model = {"net": run.net, "gate": gate}
    run.measure = lambda model: (model["gate"](model["net"](X)) - X).square().mean(1)
    scheme = sp.Fisher(budget="5%", evaluate=run.evaluate)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, Silent():
        assert manager.save(1, model=run.model, optimizer=run.optimizer).loss_report["unmeasured"] == []


def test_noise_of_evaluate_does_not_pass_for_a_look():
    run, noise = Training().steps(20), torch.Generator().manual_seed(3)
    run.measure = lambda model: loss(model["net"]).mean() * (1 + 1e-4 * torch.rand((), generator=noise))
    scheme = sp.Fisher(budget="5%", evaluate=run.evaluate)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, pytest.warns(LossWarning, match="model/ema"):
        report = manager.save(1, model=run.model, optimizer=run.optimizer)
    assert len(report.loss_report["unmeasured"]) == 4


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_find_the_same_weights(name):
    run = Training().steps(20)
    state = {"model": {part: net.state_dict() for part, net in run.model.items()}}
    parts = cut(flatten(state), 2)

    class Parts(nn.Module):
        def __init__(self, tensors: Any) -> None:
            super().__init__()
            for number, tensor in enumerate(tensors):
                self.register_parameter(f"p{number}", nn.Parameter(tensor, requires_grad=False))

    def work(rank: int, collectives: Any) -> Any:
        mine = parts[rank]
        net = {name: x for name, x in mine.flat.tensors.items() if "net" in name}
        start = {name: x.clone() for name, x in net.items()}

        def evaluate(model: Any) -> float:
            return 1.0 + sum(float((x - start[name]).square().sum()) for name, x in net.items())

        evaluator = ShardedModelEvaluator(mine.flat, evaluate, Parts(mine.flat.tensors.values()))
        layout = ShardLayout(mine.places, collectives)
        return plan_shards(SCHEMES[name](evaluate=evaluate), mine.flat, None, layout, evaluator)

    with pytest.warns(LossWarning, match="model/ema"):
        plans = Ranks(2).all(work)
    assert plans[0].loss["unmeasured"] == plans[1].loss["unmeasured"] != []
    assert all(plan.quantized and not any("ema" in name for name in plan.quantized) for plan in plans)


def test_many_entries_are_joined():
    paths = {f"model/{name}.weight": f"model/{name}.weight" for name in "abcdefghijkl"}
    entries = top_level_entries(paths, {name: (size + 1, 2) for size, name in enumerate(paths)})
    assert len(entries) == MAX_ENTRIES and sorted(name for names in entries.values() for name in names) == [*paths]


class Copies(nn.Sequential):
    """A net whose `state_dict` gives copies."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: x.clone() for name, x in super().state_dict(*args, **kwargs).items()}


def test_a_first_save_names_trained_weights_that_trials_do_not_reach(recwarn):
    nets = {"plain": mlp(), "copies": Copies(*mlp())}
    optimizer = torch.optim.AdamW([x for net in nets.values() for x in net.parameters()])
    sum(loss(net).mean() for net in nets.values()).backward()
    optimizer.step()
    scheme = sp.Fisher(budget="1%", evaluate=lambda nets: sum(map(loss, nets.values())))
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager:
        for step in range(2):
            manager.save(step, model=nets, optimizer=optimizer)
    warned = [str(x.message) for x in recwarn if "stay exact" in str(x.message)]
    assert len(warned) == 1 and "model/copies/0.weight, model/copies/2.weight" in warned[0]
