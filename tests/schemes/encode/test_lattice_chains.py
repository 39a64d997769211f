"""A store of points on points: each checkpoint is what its writer held, also after it was written again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lattice_records import same_origin
from helpers.round_trip import Loop
from helpers.small_training import Silent
from helpers.strategies import difference
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.tensors.flat_state import flatten, unflatten

SECOND = "optimizer/state/2/exp_avg_sq"


def fisher() -> sp.Fisher:
    return sp.Fisher(relative_error=0.05)


@dataclass
class Chain:
    """A store of a keyframe and four deltas, and what each must give."""

    path: Path
    expected: dict[int, Any]


def chain(path: Path, *, width: int = 96) -> Chain:
    loop, scheme, expected = Loop(width=width), fisher(), {}
    with Silent(), sp.Store(path, keyframe_every=9) as store:
        for step in range(1, 6):
            store.save(step, loop.steps(2), scheme=scheme)
            reference = store.reference
            assert reference is not None
            expected[step] = unflatten(flatten(loop.state()).tree, {n: x.clone() for n, x in reference.tensors.items()})
    return Chain(path, expected)


def test_every_checkpoint_of_a_chain_is_what_its_writer_held(tmp_path):
    one = chain(tmp_path)
    store = sp.Store(tmp_path)
    assert [manifest.depth for manifest in store.scan().visible.values()] == [0, 1, 2, 3, 4]
    for step, state in one.expected.items():
        assert difference(state, sp.Store(tmp_path).load(step)) is None
    assert not list(store.verify(deep=True))


def test_a_chain_goes_on_from_what_another_process_loaded(tmp_path):
    tensor = chain(tmp_path)
    loop, scheme = Loop(), fisher()
    with Silent(), sp.Store(tmp_path, keyframe_every=9) as store:
        assert difference(tensor.expected[5], store.load(5)) is None
        scheme.resume(store.manifest(5).loss, 1)
        store.save(6, loop.steps(12), scheme=scheme, lossy_restores=1)
        assert store.reference is not None
        tensors = {name: x.clone() for name, x in store.reference.tensors.items()}
        symbols = dict(store.reference.quantized)
    reader = sp.Store(tmp_path)
    assert difference(unflatten(flatten(loop.state()).tree, tensors), reader.load(6)) is None
    assert reader.reference is not None and reader.reference.quantized.keys() == symbols.keys()
    assert all(same_origin(tensor, symbols[name]) for name, tensor in reader.reference.quantized.items())


@pytest.mark.parametrize("forgotten", [(1,), (2, 3), (1, 2, 3, 4), (4,)])
def test_a_compacted_chain_gives_the_same_bits_and_can_be_gone_on_with(forgotten, tmp_path):
    one = chain(tmp_path)
    with Silent(), sp.Store(tmp_path, keyframe_every=9) as store:
        for step in forgotten:
            store.forget(step)
        assert store.compact()
        store.prune(dry_run=False)
    store = sp.Store(tmp_path)
    for step in {*one.expected} - {*forgotten}:
        assert difference(one.expected[step], sp.Store(tmp_path).load(step)) is None
    assert not list(store.verify(deep=True)) and len(store.scan().manifests) == 5 - len(forgotten)
    with Silent(), sp.Store(tmp_path, keyframe_every=9) as store:
        store.load(5)
        scheme = fisher()
        scheme.resume(store.manifest(5).loss)
        report = store.save(6, Loop().steps(12), scheme=scheme)
    assert not report.keyframe and not list(sp.Store(tmp_path).verify(deep=True))


def test_each_delta_can_be_made_a_keyframe(tmp_path):
    one = chain(tmp_path)
    with sp.Store(tmp_path) as store:
        for step in (3, 5):
            (report,) = store.compact(step)
            assert report.keyframe
    for step, state in one.expected.items():
        assert difference(state, sp.Store(tmp_path).load(step)) is None


def test_a_chain_is_smaller_than_its_keyframes(tmp_path):
    chain(tmp_path / "a", width=400)
    manifests = sp.Store(tmp_path / "a").scan().visible
    sizes = [manifest.stored_bytes for manifest in manifests.values()]
    assert max(sizes[1:]) < 0.8 * sizes[0] < 0.2 * manifests[1].raw_bytes


def test_a_turned_bit_in_the_middle_of_a_chain_is_found_and_named(tmp_path):
    chain(tmp_path)
    path = tmp_path / "step-000000003" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))
    findings = list(sp.Store(tmp_path).verify(deep=True))
    assert findings and any("step-000000003" in str(finding) for finding in findings)
    for step in (1, 2):
        sp.Store(tmp_path).load(step)
    with pytest.raises(sp.errors.FormatError):
        sp.Store(tmp_path).load(3)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "100"}, prog_name="shrinkpoint")
    return result.exit_code, result.stdout


def test_the_command_line_shows_verifies_and_compares_a_chain(tmp_path):
    chain(tmp_path)
    assert run("verify", "--deep", tmp_path)[0] == 0
    code, text = run("show", tmp_path)
    assert code == 0 and "fisher" in text and "chain 1 > 2 > 3 > 4 > 5" in text
    code, text = run("show", "--json", tmp_path)
    assert code == 0 and json.loads(text)["loss"]["scheme"] == "fisher"
    assert run("diff", f"{tmp_path}@4", f"{tmp_path}@4")[0] == 0
    code, text = run("diff", f"{tmp_path}@4", f"{tmp_path}@5")
    assert code == 1 and SECOND in text
    assert run("forget", tmp_path, 2)[0] == 0
    before = run("diff", f"{tmp_path}@3", f"{tmp_path}@4")
    assert run("compact", tmp_path)[0] == 0
    assert run("diff", f"{tmp_path}@3", f"{tmp_path}@4") == before
    assert run("verify", "--deep", tmp_path)[0] == 0
    assert run("list", tmp_path)[1].count("fisher") == 4


def test_a_first_moment_that_stayed_while_its_second_one_did_not_can_be_written_again(tmp_path):
    """Its points are relative to values that are no longer there, so that only its values can be kept."""
    with Silent(), sp.Store(tmp_path, keyframe_every=9) as store:
        store.save(1, Loop().steps(2), scheme=fisher())
        state = store.load(1)
        for moments in state["optimizer"]["state"].values():
            moments["exp_avg_sq"].mul_(1.5)
        store.save(2, state)
        store.forget(1)
        assert store.compact()
    assert difference(state, sp.Store(tmp_path).load(2)) is None
    assert not list(sp.Store(tmp_path).verify(deep=True))


@pytest.mark.parametrize("seed", range(6))
def test_weights_out_of_reach_are_coded_after_their_moments_whatever_records_these_share(tmp_path, seed):
    """Of some tensors the second moments stand still and are no record of this file: the first are no deeper, then."""
    torch.manual_seed(seed)
    weights = [1 + 1e-6 * torch.randn(512), torch.randn(64, 64), 1 + 1e-6 * torch.randn(300), torch.randn(70, 70)]
    model = torch.nn.ParameterList(map(torch.nn.Parameter, weights))
    optimizer = torch.optim.Adam(model, lr=1e-6)
    store = sp.Store(tmp_path)
    for step in range(4):
        for weight in model:
            weight.grad = torch.randn_like(weight) * 10**step
        before = [optimizer.state[weight].get("exp_avg_sq", torch.zeros(())).clone() for weight in model]
        optimizer.step()
        for weight, second in zip(model, before, strict=True):
            if step and torch.rand(()) < 0.5:
                optimizer.state[weight]["exp_avg_sq"].copy_(second)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with Silent():
            report = store.save(step, state, scheme=sp.Fisher(relative_error=0.01))
        assert report.exact["model/0"] == report.exact["model/2"] == "out of reach of its steps"
        loaded = sp.Store(tmp_path).load(step)["model"]
        assert torch.equal(loaded["0"], model[0].data) and torch.equal(loaded["2"], model[2].data)
