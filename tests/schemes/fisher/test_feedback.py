"""Files alone with error feedback: what a recorder records, what a calibration does, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.fisher.feedback import FeedbackFactors


class Net(nn.Module):
    """An embedding tied to the head, around a convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(24, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.token(words)
        x = x + F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(x + self.down(F.gelu(self.up(x))))


def words(seed: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Sequences, and what follows: the word before an odd one, else another word."""
    x = torch.randint(24, (count, 17), generator=torch.Generator().manual_seed(seed))
    return x[:, 1:], torch.where(x[:, 1:] % 2 == 1, x[:, :-1], (5 * x[:, 1:] + 3) % 24)


def loss_of(model: nn.Module, seed: int, count: int = 32) -> Tensor:
    x, y = words(seed, count)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.fixture(scope="module")
def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for step in range(100):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def calibrate(state: Any) -> Iterator[Tensor]:
    model = Net()
    model.load_state_dict(state)
    return (loss_of(model, 1000 + i) for i in range(4))


def rise(path: Path, state: Any, scheme: sp.Fisher) -> tuple[float, float]:
    """By how much the loss is higher after a save and a load, and the ratio of the file."""
    report = sp.save(state, path, scheme=scheme)
    before, after = Net(), Net()
    before.load_state_dict(state)
    after.load_state_dict(sp.load(path))
    with torch.no_grad():
        return float(loss_of(after, 5000, 500) - loss_of(before, 5000, 500)), report.ratio


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loss_rises_less_at_the_same_relative_error(trained: Any, tmp_path: Path):
    state = trained[0].state_dict()
    plain, plain_ratio = rise(tmp_path / "a", state, sp.Fisher(relative_error=0.3))
    fed, ratio = rise(tmp_path / "b", state, sp.Fisher(relative_error=0.3, calibrate=calibrate))
    assert 0 < fed < 0.8 * plain and ratio > 0.95 * plain_ratio


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_recorder_serves_as_a_calibration_does(trained: Any, tmp_path: Path):
    model = copy.deepcopy(trained[0])
    with sp.Activations(model) as seen:
        for i in range(4):
            loss_of(model, 1000 + i).backward()
    assert [*seen.layers] == ["token.weight", "conv.weight", "up.weight", "down.weight"]  # a tied one by its first name
    state = {"model": model.state_dict(), "optimizer": trained[1].state_dict()}
    sp.save(state, tmp_path / "a", scheme=sp.Fisher(relative_error=0.45, activations=seen))
    sp.save(state, tmp_path / "b", scheme=sp.Fisher(relative_error=0.45))
    loaded, plain = sp.load(tmp_path / "a")["model"], sp.load(tmp_path / "b")["model"]
    errors = [
        float((F.linear(words_in(model), x["up.weight"] - model.up.weight.detach())).square().sum())
        for x in (loaded, plain)
    ]
    assert errors[0] < 0.7 * errors[1]


def words_in(model: Net) -> Tensor:
    """What the layer `up` gets."""
    inputs = []
    handle = model.up.register_forward_hook(lambda _, args, __: inputs.append(args[0].detach()))
    model(words(7)[0])
    handle.remove()
    return inputs[0]


def test_second_moments_are_those_of_inputs_and_patches():
    torch.manual_seed(0)
    linear, conv = nn.Linear(6, 4), nn.Conv2d(3, 5, 3, stride=2, padding=1)
    model = nn.ModuleDict({"linear": linear, "conv": conv})
    x, images = torch.randn(7, 2, 6), torch.randn(2, 3, 9, 8)
    with sp.Activations(model) as seen:
        linear(x).square().sum().backward()
        conv(images)
    rows = x.reshape(-1, 6)
    patches = F.unfold(images, 3, padding=1, stride=2).transpose(1, 2).reshape(-1, 27)
    layers = seen.layers
    torch.testing.assert_close(layers["linear.weight"].inputs.mean, rows.T @ rows / 14)
    torch.testing.assert_close(layers["linear.weight"].outputs.mean, (2 * linear(x)).detach().square().sum((0, 1)))
    torch.testing.assert_close(layers["conv.weight"].inputs.mean, patches.T @ patches / len(patches))


def test_second_moments_are_float32_within_autocast():
    layer, x = nn.Linear(6, 4), torch.randn(7, 6)
    with sp.Activations(layer) as seen, torch.autocast("cpu", torch.bfloat16):
        layer(x)
    mean = seen.layers["weight"].inputs.mean
    assert mean.dtype == torch.float32 and torch.allclose(mean, x.T @ x / 7, atol=1e-6)


def test_a_recorder_changes_nothing_and_leaves_no_hooks(trained: Any):
    model = copy.deepcopy(trained[0])
    x = words(3)[0]
    before, state = model(x), torch.get_rng_state()
    wrapped = nn.Module()
    wrapped.module = model  # as DDP names it
    with sp.Activations(wrapped, every=2) as seen:
        outputs = [model(x) for _ in range(3)]
    assert all(torch.equal(output, before) for output in outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(layer._forward_hooks for layer in model.modules())
    assert "module.up.weight" in seen.layers
    recorded = seen.layers["module.up.weight"].inputs.weight
    model(x)
    assert seen.layers["module.up.weight"].inputs.weight == recorded == 0.95 + 1  # the first and the third
    seen.clear()
    assert not seen.layers


def test_passes_of_copies_are_not_recorded():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with sp.Activations(model) as seen:
        for one in (copy.copy(model[0]), copy.deepcopy(model[0]), copy.deepcopy(model)):
            one(torch.ones(2, 3))
        assert not seen.layers
        model(torch.ones(2, 3))
    assert [*seen.layers] == ["0.weight", "1.weight"]


def test_a_batch_that_is_not_finite_is_passed_over():
    layer = nn.Linear(3, 3)
    with sp.Activations(layer) as seen:
        layer(torch.full((2, 3), torch.nan))
        assert not seen.layers
        layer(torch.ones(2, 3))
        layer(torch.full((2, 3), torch.inf))
    torch.testing.assert_close(seen.layers["weight"].inputs.mean, torch.ones(3, 3))


def test_training_may_follow_a_validation_in_inference_mode():
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "linear": nn.Linear(3, 3)})
    with sp.Activations(model) as seen:
        with torch.inference_mode():
            model["linear"](model["embedding"](torch.arange(4)))
        model["linear"](model["embedding"](torch.arange(4))).square().sum().backward()
    assert seen.layers["linear.weight"].inputs.weight == 0.95 + 1
    assert seen.layers["embedding.weight"].lookups.weight == 1


def _vmap(layer: nn.Module, x: Tensor) -> object:
    return torch.func.vmap(layer)(x)


def _trace(layer: nn.Module, x: Tensor) -> object:
    return torch.export.export(layer, (x,))


def _fake(layer: nn.Module, x: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return layer(x)


@pytest.mark.parametrize("run", [_vmap, _trace, _fake, lambda layer, x: layer(x.to_sparse())])
def test_passes_without_values_to_record_are_passed_over(run: Callable[[nn.Module, Tensor], object]):
    layer, x = nn.Linear(3, 2), torch.eye(4, 3)
    with sp.Activations(layer) as seen:
        run(layer, x)
        assert not seen.layers
        layer(x).sum().backward()
    assert seen.layers["weight"].inputs.weight == seen.layers["weight"].outputs.weight == 1


def test_nested_tensors_are_recorded_as_their_values():
    model, x = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), torch.arange(5)
    with sp.Activations(model) as whole:
        model(x).square().sum().backward()
    with sp.Activations(model) as seen:
        nested = model(torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged))
        nested.values().square().sum().backward()
    for name, layer in seen.layers.items():
        for part in ("inputs", "outputs", "frequencies", "lookups"):
            one, other = (getattr(each, part) for each in (layer, whole.layers[name]))
            assert (one.total is None) == (other.total is None), (name, part)
            assert one.total is None or torch.allclose(one.mean, other.mean), (name, part)
    assert len(seen.layers) == 2


def test_layer_in_tensor_parallelism_is_refused_in_its_first_pass(tmp_path: Path):
    """Its averages would be DTensors, for which a save of one rank would wait for the others."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (1,)), ColwiseParallel())
        with sp.Activations(model), pytest.raises(PolicyError, match=r"activations, weight: a layer in tensor"):
            model(torch.ones(2, 4))
    finally:
        dist.destroy_process_group()


def test_gradients_and_the_state_are_as_before_a_calibration(trained: Any, tmp_path: Path):
    model = copy.deepcopy(trained[0])
    loss_of(model, 1).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = copy.deepcopy(model.state_dict())
    scheme = sp.Fisher(relative_error=0.3, calibrate=lambda _: [loss_of(model, i) for i in range(2)])
    with pytest.warns(UserWarning):
        sp.save(model.state_dict(), tmp_path / "a", scheme=scheme)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not nn.modules.module._global_forward_hooks


def test_layers_with_the_same_inputs_share_a_factor():
    torch.manual_seed(0)
    x = torch.randn(99, 16)
    model = nn.ModuleDict({name: nn.Linear(16, 8) for name in ("query", "key", "other")})
    with sp.Activations(model) as seen:
        model["query"](x), model["key"](x), model["other"](x + 1)
    factors = FeedbackFactors({name: p.detach() for name, p in model.named_parameters()}, seen.layers)
    query, key, other = (factors[f"{name}.weight"] for name in model)
    assert query is key and query is not None and other is not None and not torch.equal(query, other)


def test_dead_layers_are_rounded_plainly_and_that_is_said(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
    seen = sp.Activations(model)
    model[0](torch.randn(99, 16))
    model[1](torch.zeros(9, 64))
    with pytest.warns(UserWarning, match=r"without error feedback.*1\.weight"):
        sp.save(model.state_dict(), tmp_path / "a", scheme=sp.Fisher(relative_error=0.3, activations=seen))
    assert sp.load(tmp_path / "a")["1.weight"].isfinite().all()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_chains_are_as_without(trained: Any, tmp_path: Path):
    model, optimizer = trained
    ratios = []
    for name, more in (("plain", {}), ("fed", {"calibrate": calibrate})):
        with sp.CheckpointManager(tmp_path / name, scheme=sp.Fisher(relative_error=0.3, **more)) as manager:
            ratios.append([manager.save(step, model=model, optimizer=optimizer).stored_bytes for step in (1, 2)])
    assert ratios[0] == ratios[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_delta_against_a_file_with_feedback_is_right(trained: Any, tmp_path: Path):
    state = trained[0].state_dict()
    sp.save(state, tmp_path / "a", scheme=sp.Fisher(relative_error=0.3, calibrate=calibrate))
    sp.save(state, tmp_path / "b", scheme=sp.Fisher(relative_error=0.3, calibrate=calibrate), base=tmp_path / "a")
    for name, value in sp.load(tmp_path / "b").items():
        assert float((value - state[name]).square().mean()) < 0.5 * float(state[name].square().mean())
    sp.save(state, tmp_path / "c", base=tmp_path / "a")
    assert all(torch.equal(value, state[name]) for name, value in sp.load(tmp_path / "c").items())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_chain_after_a_file_with_feedback_is_as_near_as_one_after_a_plain_file(trained: Any, tmp_path: Path):
    model, optimizer = copy.deepcopy(trained[0]), trained[1]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    after = copy.deepcopy(state)
    generator = torch.Generator().manual_seed(3)
    for value in after["model"].values():
        value += 0.05 * value.std() * torch.randn(value.shape, generator=generator)
    errors = []
    for name, more in (("plain", {}), ("fed", {"calibrate": lambda state: calibrate(state["model"])})):
        scheme = sp.Fisher(relative_error=0.3, **more)
        sp.save(state, tmp_path / f"{name}0", scheme=scheme)
        sp.save(after, tmp_path / f"{name}1", scheme=scheme, base=tmp_path / f"{name}0")
        loaded = sp.load(tmp_path / f"{name}1")["model"]
        weights = [key for key, value in loaded.items() if value.dim() > 1]
        errors.append(sum(float((loaded[key] - after["model"][key]).square().sum()) for key in weights))
    assert 0 < errors[1] < 1.2 * errors[0]


def test_a_calibration_and_a_recorder_are_not_both_given():
    with pytest.raises(PolicyError, match="one of them"):
        sp.Fisher(relative_error=0.3, calibrate=len, activations=sp.Activations(nn.Linear(2, 2)))


def _raise(_: Any) -> None:
    raise KeyError("batches")


def _raise_later(state: Any) -> Iterator[Tensor]:
    yield from calibrate(state)
    raise OSError("no more batches")


def _nothing(_: Any) -> Iterator[Tensor]:
    yield from ()


def _other_shapes() -> sp.Activations:
    model = nn.ModuleDict({"up": nn.Linear(8, 64), "down": nn.Linear(64, 8)})
    with sp.Activations(model) as seen:
        model["down"](model["up"](torch.randn(5, 8)))
    return seen


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (sp.Fisher(relative_error=0.3, calibrate=len), "ran no layer"),
        (sp.Fisher(relative_error=0.3, calibrate=lambda _: Net()(words(0)[0])), "ran no layer"),
        (sp.Fisher(relative_error=0.3, calibrate=_raise), "KeyError: 'batches'"),
        (sp.Fisher(relative_error=0.3, calibrate=_raise_later), "OSError: no more batches"),
        (sp.Fisher(relative_error=0.3, calibrate=_nothing), "ran no layer"),
        (sp.Fisher(relative_error=0.3, activations=sp.Activations(Net())), "none of these weights"),
        (sp.Fisher(relative_error=0.3, activations=_other_shapes()), "none of these weights"),
    ],
)
def test_a_calibration_of_another_model_is_refused(trained: Any, tmp_path: Path, scheme: sp.Fisher, text: str):
    with pytest.raises(PolicyError, match=text):
        sp.save(trained[0].state_dict(), tmp_path / "a", scheme=scheme)


RANKS = """
    import warnings
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from helpers.replica_search import join, leave
    import shrinkpoint as sp

    def of_rank(rank, width, folder):
        said = join(rank, width, folder)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
        mixing = torch.randn(4, 16, generator=torch.Generator().manual_seed(9))
        generator = torch.Generator().manual_seed(rank)
        with sp.Activations(model) as seen:
            for _ in range(3):
                model(torch.randn(64, 4, generator=generator) @ mixing).square().mean().backward()
        said["names"] = [*seen.layers]
        said["first"] = float(seen.layers["module.0.weight"].inputs.mean[0, 0])
        if rank == 0:
            state = {name: value.detach() for name, value in model.module.state_dict().items()}
            errors = []
            for name, more in (("plain", {}), ("fed", {"activations": seen})):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    sp.save(state, f"{folder}/{name}", scheme=sp.Fisher(relative_error=0.45, **more))
                error = sp.load(f"{folder}/{name}")["0.weight"] - state["0.weight"]
                errors.append(float((mixing @ error.T).square().sum()))
            said["errors"] = errors
        leave(said, rank, folder)
"""


def test_under_ddp_the_rank_that_saves_takes_what_it_has_seen(tmp_path: Path):
    first, second = ranks(RANKS, 2, tmp_path)
    assert first["names"] == second["names"] == ["module.0.weight", "module.2.weight"]
    assert first["first"] != second["first"]  # each has its own batches
    plain, fed = first["errors"]
    assert 0 < fed < 0.7 * plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_on_a_device_is_saved_with_feedback(trained: Any, tmp_path: Path):
    model = copy.deepcopy(trained[0]).cuda()
    with sp.Activations(model) as seen:
        x, y = (part.cuda() for part in words(1000))
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert all(layer.inputs.total.is_cuda for layer in seen.layers.values() if layer.inputs.total is not None)
    inputs, errors = words_in(model.cpu()), []
    model.cuda()
    for name, more in (("plain", {}), ("fed", {"activations": seen})):
        sp.save(model.state_dict(), tmp_path / name, scheme=sp.Fisher(relative_error=0.45, **more))
        error = sp.load(tmp_path / name)["up.weight"].cpu() - model.up.weight.detach().cpu()
        errors.append(float(F.linear(inputs, error).square().sum()))
    assert 0 < errors[1] < 0.8 * errors[0]
