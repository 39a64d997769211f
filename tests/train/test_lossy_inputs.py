"""Models as they come: tied, frozen, narrow, changed between saves, broken; and requests that cannot be met."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.small_training import Digits, LettersRun, Run, unchanged
from helpers.strategies import difference, same
from torch import nn
from torch.nn import functional as F

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.tensors.memory import callers_default, host_by_default

CONFIG = {"bins": 16, "embedding_bins": 32, "prune": 0.1, "protect": 0.005}


def saved(where, run, scheme=None, **more):
    """A report, and the model that is restored from the checkpoint."""
    scheme = scheme or sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate)
    with sp.CheckpointManager(where, scheme=scheme) as manager:
        report = manager.save(1, **run.parts, **more)
    other = copy.deepcopy(run)
    sp.CheckpointManager(where).restore(**other.parts)
    return report, other


def test_a_tied_embedding_has_the_bins_of_embeddings_and_stays_tied(tmp_path):
    run = LettersRun(steps=40)
    report, other = saved(tmp_path, run)
    assert other.model.lm_head.weight is other.model.wte.weight
    assert run.loss(other.model) <= 1.05 * run.loss()
    values = other.model.wte.weight.unique().numel()
    assert values > report.loss_report["chosen"]["bins"] and not same(other.model.state_dict(), run.model.state_dict())


def test_frozen_weights_are_quantized_by_size_and_not_touched_in_training(tmp_path):
    run = Run(steps=20)
    run.model.body[0].requires_grad_(False)
    recorder = sp.train.GradientRecorder(run.model)
    run.steps(10, recorder)
    assert "body.0.weight" not in recorder.mean
    frozen = run.model.body[0].weight.clone()
    report, other = saved(tmp_path, run, sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate, gradients=recorder))
    assert torch.equal(frozen, run.model.body[0].weight) and not run.model.body[0].weight.requires_grad
    assert not torch.equal(frozen, other.model.body[0].weight) and report.loss_report["degradation"] <= 0.05


def test_what_stays_frozen_costs_nothing_the_second_time(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 10)).requires_grad_(False)
    sizes = []
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(config=CONFIG)) as manager:
        for step in range(3):
            sizes.append(manager.save(step, model=model, rng=False).stored_bytes)
    assert sizes[1] < sizes[0] / 8 and sizes[2] < sizes[0] / 8


def test_buffers_and_norms_come_back_bit_by_bit(tmp_path):
    run = Run(steps=20)
    _, other = saved(tmp_path, run)
    for name, x in run.model.state_dict().items():
        assert torch.equal(x, other.model.state_dict()[name]) is (name not in ("body.0.weight", "body.3.weight"))


class Mixed(Run):
    """A 16-bit model with float32 masters in the optimizer's hands."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = Digits().to(dtype)
        self.model.body[1].float()
        self.dtype = dtype
        self.masters = nn.ParameterList([parameter.detach().float().clone() for parameter in self.model.parameters()])
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=3e-3)

    def forward(self, model, x):
        x = model.body[0](x.to(self.dtype)).float()
        x = model.body[3](F.gelu(model.body[1](x)).to(self.dtype))
        return model.head(F.gelu(x)).float()

    def steps(self, count, recorder=None):
        for _ in range(count):
            batch = torch.randint(0, 1200, (128,))
            F.cross_entropy(self.forward(self.model, self.data()[0][batch]), self.data()[1][batch]).backward()
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                    parameter.copy_(master)
        return self

    def evaluate(self, model):
        self.calls += 1
        model.eval()
        return F.cross_entropy(self.forward(model, self.data()[0][1200:1700]), self.data()[1][1200:1700])

    @property
    def parts(self):
        return {"model": self.model, "masters": self.masters, "optimizer": self.optimizer}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_follows_its_masters(tmp_path, dtype):
    run = Mixed(dtype)
    run.steps(60)
    before = run.photo()
    masters = copy.deepcopy(run.masters.state_dict())
    report, other = saved(tmp_path, run)
    assert unchanged(run, before) and same(masters, run.masters.state_dict())
    assert not same(masters, other.masters.state_dict())
    for parameter, master in zip(other.model.parameters(), other.masters, strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))
    assert report.loss_report["degradation"] <= 0.05 and run.loss(other.model) <= 1.05 * run.loss() * (1 + 1e-4)
    other.steps(5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_without_masters_is_quantized_itself(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to(dtype)
    origin = copy.deepcopy(model)

    @torch.no_grad()
    def evaluate(one):
        pairs = zip(one.parameters(), origin.parameters(), strict=True)
        return 1 + sum(float((a - b).float().square().mean()) for a, b in pairs)

    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(threshold=0.001, evaluate=evaluate)) as manager:
        report = manager.save(1, model=model)
    assert same(model.state_dict(), origin.state_dict())
    sp.CheckpointManager(tmp_path).restore(model=model)
    assert model[0].weight.dtype == dtype and 1 < evaluate(model) <= 1.001 and report.weights_ratio > 2.5


def test_averages_and_teachers_that_are_not_evaluated_stay_exact(tmp_path):
    run = Run(steps=20)
    ema = copy.deepcopy(run.model)
    report, _ = saved(tmp_path, run, ema=ema)
    loaded = sp.Store(tmp_path).load()
    assert same(dict(loaded["ema"]), dict(ema.state_dict())) and not same(loaded["model"], run.model.state_dict())
    assert report.loss_report["degradation"] <= 0.05


def test_a_buffer_that_looks_like_a_weight_stays_exact(tmp_path):
    run = Run(steps=20)
    run.model.register_buffer("positions", torch.randn(80, 80))
    run.model.body.register_buffer("weight", torch.randn(80, 80))
    _, other = saved(tmp_path, run)
    assert torch.equal(other.model.positions, run.model.positions)
    assert torch.equal(other.model.body.weight, run.model.body.weight)


def test_a_model_of_small_tensors_is_exact_and_nothing_is_measured(tmp_path):
    run = Run(lambda: nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 10)), steps=10)
    report, other = saved(tmp_path, run)
    assert difference(run.model.state_dict(), other.model.state_dict()) is None
    assert run.calls == 0 and "chosen" not in report.loss_report and report.loss_report["left_out"] == []
    assert not sp.Store(tmp_path).manifest().is_lossy


class Growing(nn.Module):
    def __init__(self, width: int, *, name: str = "body") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(64, width))
        self.head = nn.Linear(width, 10)
        self.name = name

    def forward(self, x):
        return self.head(F.gelu(self.get_submodule(self.name)(x)))


def test_tensors_may_change_in_shape_and_name_between_saves(tmp_path):
    settings = [(96, "body"), (128, "body"), (128, "trunk"), (64, "trunk"), (32, "trunk"), (128, "body")]
    run = Run()
    scheme = sp.Inshrinkerator(threshold=0.1, evaluate=run.evaluate)
    with sp.CheckpointManager(tmp_path, scheme=scheme) as manager:
        for step, (width, name) in enumerate(settings):
            torch.manual_seed(step)
            run.model = Growing(width, name=name)
            run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3)
            run.steps(20)
            report = manager.save(step, **run.parts)
            assert (report.loss_report.get("degradation") or 0.0) <= 0.1
    for step, (width, name) in enumerate(settings):
        other = Growing(width, name=name)
        assert sp.CheckpointManager(tmp_path).restore(step, model=other).step == step


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_kept_and_the_rest_measured(tmp_path, value):
    run = Run(steps=20)
    with torch.no_grad():
        run.model.body[3].weight[0, 0] = value

    origin = run.model.body[0].weight.detach().clone()

    def evaluate(model):
        return float((model.body[0].weight - origin).norm()) + 1.0

    with pytest.warns(LossWarning, match=r"nan or infinite values .*model/body\.3\.weight"):
        report, other = saved(tmp_path, run, sp.Inshrinkerator(evaluate=evaluate))
    assert difference(run.model.body[3].state_dict(), other.model.body[3].state_dict()) is None
    assert report.loss_report["left_out"] == ["model/body.3.weight"]
    assert not torch.equal(run.model.body[0].weight, other.model.body[0].weight)


def test_a_run_that_has_diverged_is_saved_as_it_is(tmp_path):
    run = Run(steps=5)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(math.nan)
    with pytest.warns(LossWarning) as caught:
        report, other = saved(tmp_path, run)
    assert "nan or infinite" in str(caught[0].message)
    assert difference(run.model.state_dict(), other.model.state_dict()) is None and "chosen" not in report.loss_report


def test_what_cannot_be_evaluated_is_refused_before_anything_is_saved(tmp_path):
    run = Run()
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(evaluate=run.evaluate)) as manager:
        for parts in ({}, {"optimizer": run.optimizer}, {"model": run.optimizer}, {"model": {}}):
            with pytest.raises(PolicyError, match="model"):
                manager.save(1, **parts)
        assert manager.store.steps() == []
        assert manager.save(1, **run.parts) is not None


def test_a_model_on_which_nothing_can_be_tried_may_have_a_setting(tmp_path):
    """Something with a `state_dict` that is no module."""

    class Holder:
        def __init__(self) -> None:
            self.weight = torch.randn(80, 80)

        def state_dict(self):
            return {"a.weight": self.weight}

        def load_state_dict(self, state):
            self.weight = state["a.weight"]

    holder = Holder()
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(config=CONFIG)) as manager:
        assert manager.save(1, model=holder).weights_ratio > 3
    other = Holder()
    sp.CheckpointManager(tmp_path).restore(model=other)
    assert 0 < (other.weight - holder.weight).norm() / holder.weight.norm() < 0.3


def test_a_save_within_autocast_measures_the_weights_of_each_trial(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    scheme = sp.Fisher(budget="1%", evaluate=lambda model: (model(x) - x).float().square().mean(1))
    with sp.CheckpointManager(tmp_path, scheme=scheme) as manager, torch.autocast("cpu", torch.bfloat16):
        (model(x) - x).square().mean().backward()  # autocast keeps its cast of the weight from here on
        assert manager.save(1, model=model, optimizer=torch.optim.AdamW(model.parameters())).weights_ratio > 4
        model.zero_grad()
        after = model(x)  # with casts of the weights as they are, not of a trial's
        after.float().sum().backward()
        assert torch.equal(after, F.linear(x, model.weight.detach(), model.bias.detach()))
        assert model.weight.grad is not None


SCHEMES = {
    "lossless": lambda evaluate: "lossless",
    "fisher": lambda evaluate: sp.Fisher(budget="1%", evaluate=evaluate),
    "inshrinkerator": lambda evaluate: sp.Inshrinkerator(threshold="5%", evaluate=evaluate),
    "lc": lambda evaluate: sp.LCCheckpoint(),
    "recent": lambda evaluate: sp.Fisher(budget="5%", evaluate=recent_batches()),
}


def recent_batches() -> sp.RecentBatches:
    recent = sp.RecentBatches(lambda model, batch: (model(batch) - batch).square().mean())
    for _ in range(8):
        recent.add(torch.randn(8, 64, device="cpu"))
    return recent


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_default_device_changes_nothing_but_what_evaluate_makes(tmp_path, scheme):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    devices = set()

    def evaluate(model):
        devices.add(torch.empty(0).device.type)
        return (model(x) - x).square().mean(1)

    with torch.device("meta"):  # what is made without a device has no values
        manager = sp.CheckpointManager(tmp_path, scheme=SCHEMES[scheme](evaluate))
    with manager:
        for step in range(3):
            (model(x) - x).square().mean().backward()
            optimizer.step()
            with torch.device("meta"):
                manager.save(step, model=model, optimizer=optimizer)
        values = copy.deepcopy(model.state_dict())
        with torch.device("meta"):
            manager.restore(model=model, optimizer=optimizer)
            loaded = sp.load(tmp_path)["model"]
    assert devices <= {"meta"} and same(loaded, model.state_dict())
    assert (scheme == "lossless") == same(values, model.state_dict())


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")
@pytest.mark.parametrize("scheme", [*SCHEMES, "scar"])
def test_another_default_dtype_changes_nothing(tmp_path, scheme):
    def loaded_under(dtype):
        torch.manual_seed(0)
        model, x = nn.Linear(64, 64), torch.randn(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        chosen = SCHEMES.get(scheme, lambda _: scheme)(lambda model: (model(x) - x).square().mean(1))
        with sp.CheckpointManager(tmp_path / str(dtype), scheme=chosen) as manager:
            for step in range(3):
                (model(x) - x).square().mean().backward()
                optimizer.step()
                torch.set_default_dtype(dtype)
                try:
                    manager.save(step, model=model, optimizer=optimizer)
                finally:
                    torch.set_default_dtype(torch.float32)
        return sp.load(tmp_path / str(dtype))["model"]

    assert same(loaded_under(torch.float64), loaded_under(torch.float32))


@pytest.mark.parametrize("scheme", [sp.Fisher(relative_error=0.3), sp.LCCheckpoint()])
def test_weights_of_a_dtype_that_stays_exact_are_announced(tmp_path, scheme):
    state = {"model": nn.Linear(64, 64).double().state_dict()}
    with pytest.warns(LossWarning, match=r"nothing is lossy \(torch.float64\): model/weight. Save them in float32"):
        sp.save(state, tmp_path / "a", scheme=scheme)


def test_calibrate_has_the_default_device_of_who_saves(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(8192, 64)  # more rows than are recorded
    devices = []

    def calibrate(state):
        devices.append(torch.empty(0).device.type)
        model(x)

    plan = sp.Fisher(relative_error=0.3, calibrate=calibrate)
    with torch.device("meta"):
        sp.save({"model": model.state_dict()}, tmp_path / "model", scheme=plan)
    loaded = sp.load(tmp_path / "model")["model"]
    assert devices == ["meta"] and not torch.equal(loaded["weight"], model.weight)


def test_a_function_of_the_caller_sets_a_default_device_of_its_own():
    with torch.device("meta"), host_by_default(), callers_default(), torch.device("cpu"):
        assert torch.empty(0).device.type == "cpu"
        with host_by_default(), callers_default():  # what that function calls is called on the host
            assert torch.empty(0).device.type == "cpu"
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_settings_of_the_process_that_evaluate_changes_come_back(tmp_path, scheme):
    """Training goes on in its dtype, on its device and with its threads, and so does the save itself."""
    torch.manual_seed(0)
    model, x, threads = nn.Linear(64, 64), torch.randn(64, 64), torch.get_num_threads()
    optimizer = torch.optim.AdamW(model.parameters())
    (model(x) - x).square().mean().backward()
    optimizer.step()

    def evaluate(model):
        loss = (model(x) - x).square().mean(1)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True)
        return loss

    try:
        with sp.CheckpointManager(tmp_path, scheme=SCHEMES[scheme](evaluate)) as manager:
            manager.save(1, model=model, optimizer=optimizer)
        assert torch.empty(0).dtype == torch.float32 and torch.empty(0).device.type == "cpu"
        assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("scheme", ["lossless", "fisher(relative_error=0.3)"])
def test_a_loop_may_save_and_restore_within_inference_mode(tmp_path, scheme, background):
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(step):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    with sp.CheckpointManager(tmp_path, scheme=scheme, background=background) as manager:
        for step in range(6):
            train(step)
            with torch.inference_mode(step % 3 < 2):
                manager.save(step, model=model, optimizer=optimizer)
        optimizer = torch.optim.AdamW(model.parameters())  # the restore makes its moments
        with torch.inference_mode():
            assert manager.restore(model=model, optimizer=optimizer).step == 5
        train(6)
