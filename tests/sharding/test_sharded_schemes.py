"""Lossy schemes of ranks that each have some boxes of the tensors: what is decided is what one process would decide."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from helpers.sharded_states import Ranks, Saved, after, columns, cut, joined, other, quarters, rows, saved, whole
from helpers.small_state import BINS, PRUNED, SCHEMES, SLOTS, Tiny, assert_agreed, run

import shrinkpoint as sp
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes import Scheme
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.collectives import LocalCollectives
from shrinkpoint.sharding.global_tensors import ShardLayout, ShardSpec
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_on_several_ranks_become_what_the_whole_tensors_would(name):
    expected, found = whole(SCHEMES[name](), run()), saved(SCHEMES[name], run(), 3)
    assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]
    assert_agreed(found)


@pytest.mark.parametrize("name", ["fisher by budget", "inshrinkerator", "cnr", "qd", "lc", "excp as released", "scar"])
def test_columns_on_several_ranks_become_what_the_whole_tensors_would(name):
    expected, found = whole(SCHEMES[name](), run()), saved(SCHEMES[name], run(), 2, columns)
    for a, b in zip(expected, found, strict=True):
        dithered = {n for n, x in a.kept[0].quantized.items() if isinstance(x, LatticeTensor) and x.lattice.seed}
        assert {*other(a, b)} <= dithered
        for n in other(a, b):  # another dither, on the same steps
            x, steps = a.kept[0].quantized[n], a.tensors[a.kept[0].quantized[n].relative_to or n]
            scale = x.lattice.scales(steps.reshape(steps.shape[0], -1)).reshape(steps.shape)
            assert bool(((a.tensors[n] - b.tensors[n]).abs() <= 1.001 * scale).all())
    assert_agreed(found)


@pytest.mark.parametrize("name", ["fisher, moments exact", "inshrinkerator", "excp", "topn"])
def test_boxes_of_any_kind_become_what_the_whole_tensors_would(name):
    expected, found = whole(SCHEMES[name](), run()), saved(SCHEMES[name], run(), 4, quarters)
    assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]
    assert_agreed(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_boxes_on_a_gpu_are_decided_as_those_on_the_host_are_stored():
    flats = [replace(flat, tensors={n: x.cuda() for n, x in flat.tensors.items()}) for flat in run()]
    for scheme in SCHEMES.values():
        found = saved(scheme, flats, 2)
        assert_agreed(found)
        assert all(one.tensors.keys() == run()[0].tensors.keys() for one in found)


@pytest.mark.parametrize("dial", [{"relative_error": 0.2}, {"terms": 64}, {"ratio": 12}])
def test_a_process_with_all_boxes_decides_what_it_would_without_any(dial):
    """Through all that is done for several ranks, but on one."""
    (part,) = cut(run()[0], 1)
    names = {name: x for name, x in part.flat.tensors.items() if x.dim() and x.shape[0] > 3}
    tensors, infos, places = {}, {}, {}
    for name, x in part.flat.tensors.items():
        for i, piece in enumerate(x.split(-(-x.shape[0] // 2)) if name in names else [x]):
            mine = f"{name}@{i}"
            offsets = (i * -(-x.shape[0] // 2), *(0 for _ in x.shape[1:])) if name in names else (0,) * x.dim()
            tensors[mine], places[mine] = piece, ShardSpec(name, tuple(x.shape), offsets)
            infos[mine] = replace(part.flat.infos[name], name=mine, shape=tuple(piece.shape))
    optim = {
        f"{name}@{i}": replace(
            facts, moment1=f"{facts.moment1}@{i}", moment2=f"{facts.moment2}@{i}", squares=f"{facts.squares}@{i}"
        )
        for name, facts in part.flat.optimizer_info.items()
        for i in range(1 + (name in names))
    }
    kinds = {name: part.flat.moment_kinds[name[:-2]] for name in tensors if name[:-2] in part.flat.moment_kinds}
    flat = FlatState(None, tensors, infos, optim, kinds)
    kept = plan_shards(sp.Fisher(**dial), flat, None, ShardLayout(places, LocalCollectives())).quantize(flat, None)
    (expected,) = whole(sp.Fisher(**dial), run()[:1])
    assert other(expected, Saved(joined([(kept.state.tensors, places)]), [], [])) == []


def test_a_process_that_is_alone_decides_as_without_shards():
    for make in SCHEMES.values():
        expected, found = whole(make(), run()), saved(make, run(), 1)
        assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]
        assert [one.loss for one in expected] == [one.loss for one in found]


def test_after_a_restore_the_dither_is_that_of_the_whole():
    (first, *_) = whole(sp.Fisher(relative_error=0.2), run()[:1])

    def make() -> Scheme:
        scheme = sp.Fisher(relative_error=0.2)
        scheme.resume(first.loss[0], lossy_restores=3)
        return scheme

    expected, found = whole(make(), run()), saved(make, run(), 4)
    seeds = {one.lattice.seed for one in found[0].kept[1].quantized.values() if isinstance(one, LatticeTensor)}
    assert len(seeds) > 10
    assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]


def test_after_a_restore_inshrinkerator_rounds_boxes_by_chance_of_their_own():
    def make() -> Scheme:
        scheme = sp.Inshrinkerator(config=PRUNED)
        scheme.resume(None, lossy_restores=1)
        return scheme

    (expected,), (found,) = whole(make(), run()[:1]), saved(make, run()[:1], 3)
    weight = run()[0].tensors["model/wte.weight"]
    errors = [float((one.tensors["model/wte.weight"] - weight).square().mean()) for one in (expected, found)]
    assert errors[0] != errors[1] == pytest.approx(errors[0], rel=0.1)
    assert_agreed([found])


def test_gobo_finds_the_outliers_of_the_whole_and_centroids_as_good():
    def make() -> Scheme:
        return sp.GOBO(config=BINS)

    (expected,), (found,) = whole(make(), run()[:1]), saved(make, run()[:1], 3)
    assert_agreed([found])
    for name, one in expected.kept[0].quantized.items():
        x = run()[0].tensors[name]
        apart = joined(
            [
                (
                    {name: (kept.quantized[name].codes == 0).to(torch.uint8)},
                    {name: ShardSpec(name, tuple(x.shape), rows(tuple(x.shape), 3, rank)[0])},
                )
                for rank, kept in enumerate(found.kept)
            ]
        )[name]
        assert torch.equal(apart != 0, one.codes == 0)
        wanted, made = (float((all_of.tensors[name] - x).abs().sum()) for all_of in (expected, found))
        assert made <= 1.03 * wanted


@pytest.mark.parametrize("order", ["round robin", "random"])
def test_scar_writes_as_many_values_in_any_order(order):
    expected, found = (whole(sp.SCAR(order=order), run())[1], saved(lambda: sp.SCAR(order=order), run(), 3)[1])
    old = run()[0].tensors
    changed = [
        sum(int((one.tensors[n] != old[n]).sum()) for n in expected.kept[0].quantized) for one in (expected, found)
    ]
    assert changed[1] == pytest.approx(changed[0], rel=0.05)


def test_tensors_that_one_rank_has_whole_count_as_the_others_do():
    names = [name for name, _ in Tiny().named_parameters()]
    ours = {f"model/{name}" for name in names if "norm" in name or "down" in name}
    ours |= {f"optimizer/state/{i}/{slot}" for i, name in enumerate(names) if f"model/{name}" in ours for slot in SLOTS}
    for make in (SCHEMES["fisher by budget"], SCHEMES["inshrinkerator"], SCHEMES["excp"]):
        expected, found = whole(make(), run()), saved(make, run(), 2, lone=dict.fromkeys(ours, 1))
        assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]
        assert_agreed(found)


def muon_run() -> list[FlatState]:
    """Two states of a run of Muon on matrices, and AdamW on the rest."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48))
    matrices, vectors = [net[0].weight, net[1].weight], [net[0].bias, net[1].bias]
    optimizers = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors)
    flats = []
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
            net(torch.randn(9, 48)).square().mean().backward()
            optimizer.step()
        state = {"model": net.state_dict(), "optimizer": [optimizer.state_dict() for optimizer in optimizers]}
        flats.append(flatten(copy.deepcopy(state)))
    return flats


@pytest.mark.parametrize("cutter", [rows, quarters])
def test_of_muon_on_several_ranks_becomes_what_it_would_on_one(cutter):
    def make() -> Scheme:
        return sp.Fisher(relative_error=0.3)

    width = 4 if cutter is quarters else 3
    expected, found = whole(make(), muon_run()), saved(make, muon_run(), width, cutter)
    assert any(name.endswith("momentum_buffer") for name in expected[0].kept[0].quantized)
    for a, b in zip(expected, found, strict=True):
        names = other(a, b)
        assert names == [] if cutter is rows else all(name.endswith(("buffer", "weight")) for name in names)
    assert_agreed(found)


def fully_qualified(flat: FlatState) -> FlatState:
    """The same with the names that torch.distributed.checkpoint gives."""
    names = {}
    parameters = [name for name, _ in Tiny().named_parameters()]
    for name in flat.tensors:
        head, *rest = name.split("/")
        if head == "optimizer":
            rest = ["state", parameters[int(rest[1])], rest[2]]
        names[name] = ".".join((head, *rest))
    return FlatState(
        flat.tree,
        {names[name]: x for name, x in flat.tensors.items()},
        {names[name]: replace(info, name=names[name]) for name, info in flat.infos.items()},
        {
            names[name]: replace(one, **{key: names[getattr(one, key)] for key in ("moment1", "moment2", "squares")})
            for name, one in flat.optimizer_info.items()
        },
        {names[name]: kind for name, kind in flat.moment_kinds.items()},
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_moments_on_another_rank_than_their_weight_still_tell_of_it(shift):
    """As where replicas share what they save by size. Adam's bias is known of those weights that lie beside theirs."""
    flat = fully_qualified(run()[0])
    lone = {name: (i + shift) % 2 for i, name in enumerate(flat.tensors)}
    (expected,), (found,) = (
        whole(sp.Fisher(relative_error=0.2), [flat]),
        saved(lambda: sp.Fisher(relative_error=0.2), [flat], 2, lone=lone),
    )
    assert_agreed([found])
    weights = {name for name, info in flat.infos.items() if info.role is Role.PARAMETER}
    steps = [
        {
            name: kept.quantized[name].lattice
            for one in saves.kept
            for kept in [one]
            for name in weights & {*kept.quantized}
        }
        for saves in (expected, found)
    ]
    assert steps[0].keys() == steps[1].keys() == {name for name in weights if flat.tensors[name].numel() >= 16}
    for name in steps[0]:  # sums are rounded otherwise
        for side in ("rows", "columns"):
            a, b = (getattr(one[name], side).int() for one in steps)
            assert int((a - b).abs().max()) <= 1


def test_what_is_called_after_two_weights_tells_of_none():
    """Nothing is known of a weight then, and all ranks agree on that."""
    flat = fully_qualified(run()[0])
    twice = copy.deepcopy(flat.tensors["model.up.weight"]) + 0.1
    flat = replace(
        flat,
        tensors=flat.tensors | {"ema.up.weight": twice},
        infos=flat.infos | {"ema.up.weight": replace(flat.infos["model.up.weight"], name="ema.up.weight")},
    )
    lone = {name: i % 2 for i, name in enumerate(flat.tensors)}
    (found,) = saved(SCHEMES["fisher by error"], [flat], 2, lone=lone)
    assert_agreed([found])
    for name, info in flat.infos.items():
        if info.role is Role.PARAMETER:
            x = flat.tensors[name]
            assert float((found.tensors[name] - x).norm()) <= 0.6 * float((x - x.mean()).norm()) + 1e-6


def test_boxes_of_one_row_and_of_none_are_written_too():
    torch.manual_seed(1)
    weights = {"a.weight": torch.randn(5, 64), "b.weight": torch.randn(2, 40), "c.bias": torch.randn(3 * 16)}
    flat = flatten({"model": weights})
    (expected,), (found,) = (
        whole(sp.Fisher(relative_error=0.1), [flat]),
        saved(lambda: sp.Fisher(relative_error=0.1), [flat], 4),
    )
    assert [kept.state.tensors["model/a.weight"].shape[0] for kept in found.kept] == [2, 2, 1, 0]
    assert_agreed([found])
    for name, x in flat.tensors.items():
        wanted, made = (float((one.tensors[name] - x).norm() / x.norm()) for one in (expected, found))
        assert made <= 1.3 * wanted + 1e-6 and made < 0.15


def test_one_value_that_is_not_finite_leaves_all_boxes_of_its_tensor_exact():
    flat = copy.deepcopy(run()[0])
    flat.tensors["model/up.weight"][-1, -1] = torch.nan
    for make in (SCHEMES["fisher by error"], SCHEMES["cnr"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LossWarning)
            (found,) = saved(make, [flat], 3)
        assert found.loss[0]["left_out"] == ["model/up.weight"]
        assert all("model/up.weight" not in kept.quantized for kept in found.kept)
        assert "model/down.weight" in found.kept[0].quantized
        assert_agreed([found])


def test_narrow_copies_follow_their_masters():
    torch.manual_seed(2)
    masters = {name: torch.randn(64, 96) for name in ("a.weight", "b.weight")}
    state = {"model": {name: x.bfloat16() for name, x in masters.items()}, "master": masters}
    for make in (SCHEMES["fisher by error"], SCHEMES["cnr"]):
        (found,) = saved(make, [flatten(state)], 3)
        for name in masters:
            narrow, master = found.tensors[f"model/{name}"], found.tensors[f"master/{name}"]
            assert torch.equal(narrow, master.bfloat16()) and not torch.equal(master, masters[name])


def test_a_rank_without_the_checkpoint_before_makes_all_begin_anew():
    parts = [cut(flat, 2) for flat in run()]

    def work(make):
        def on(rank, collectives):
            scheme, reference = make(), None
            for i, mine in enumerate(one[rank] for one in parts):
                held = None if rank == 1 and i == 1 else reference
                made = plan_shards(scheme, mine.flat, held, ShardLayout(mine.places, collectives))
                kept = made.quantize(mine.flat, held)
                reference = after(kept, mine.flat)
            return kept

        return on

    for kept in Ranks(2).all(work(sp.LCCheckpoint)):
        assert not kept.quantized and kept.loss is None
    found = Ranks(2).all(work(lambda: sp.Fisher(terms=64)))
    (expected,) = whole(sp.Fisher(terms=64), run()[1:])
    made = joined([(kept.state.tensors, parts[1][rank].places) for rank, kept in enumerate(found)])
    weights = {name for name, info in run()[1].infos.items() if info.role is Role.PARAMETER}
    assert not weights & {*other(expected, Saved(made, [], []))}
