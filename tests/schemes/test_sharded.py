"""Lossy schemes of ranks that each have some boxes of the tensors: what is decided is what one process would decide."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sharded import Part, Ranks, Saved, after, box_of, columns, cut, joined, other, quarters, rows, saved, whole
from torch import nn
from torch.nn import functional as F

import shrinkpoint as sp
from shrinkpoint.codec import Points, Symbols
from shrinkpoint.codec.lattice import matrix
from shrinkpoint.errors import LossWarning, MismatchError, PolicyError, StateError
from shrinkpoint.record import Role
from shrinkpoint.schemes import Scheme
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.drafts import Drafts
from shrinkpoint.schemes.sharded import ShardTarget, check, settle
from shrinkpoint.schemes.shards import Shard, Shards
from shrinkpoint.state import FlatState, flatten

BINS = {"bins": 16, "embedding_bins": 16}
SLOTS = ("exp_avg", "exp_avg_sq")
PRUNED = {**BINS, "prune": 0.1, "protect": 0.005}
SCHEMES = {
    "fisher by error": lambda: sp.Fisher(relative_error=0.2),
    "fisher by budget": lambda: sp.Fisher(terms=64),
    "fisher by ratio": lambda: sp.Fisher(ratio=12),
    "fisher, moments exact": lambda: sp.Fisher(relative_error=0.2, moments="exact"),
    "fisher, moments dropped": lambda: sp.Fisher(relative_error=0.2, moments="drop"),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=PRUNED),
    "inshrinkerator as printed": lambda: sp.Inshrinkerator(config=PRUNED, paper=True),
    "inshrinkerator, moments lossy": lambda: sp.Inshrinkerator(config=PRUNED, optimizer="lossy"),
    "inshrinkerator, moments reset": lambda: sp.Inshrinkerator(config=PRUNED, optimizer="reset"),
    "cnr": lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}),
    "qd": lambda: sp.QD(config={"least": 8, "most": 64}),
    "lc": sp.LCCheckpoint,
    "lc as printed": lambda: sp.LCCheckpoint(paper=True),
    "lc, moments lossy": lambda: sp.LCCheckpoint(optimizer="lossy"),
    "excp": sp.ExCP,
    "excp as released": lambda: sp.ExCP(rule="released"),
    "scar": sp.SCAR,
    "topn": sp.TOPN,
}


class Tiny(nn.Module):
    """An embedding, linear layers of odd sizes, a norm, a convolution of four axes."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(150, 64)
        self.up, self.down = nn.Linear(64, 97), nn.Linear(97, 65)
        self.norm, self.conv = nn.LayerNorm(65), nn.Conv2d(1, 9, (3, 3), padding=1)
        self.head = nn.Linear(65, 150)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(F.gelu(self.up(self.wte(x)))))
        return self.head(hidden + self.conv(hidden[:, None, None]).mean((1, 2)))


@functools.cache
def run() -> tuple[FlatState, FlatState]:
    """Two checkpoints of a training run."""
    torch.manual_seed(0)
    model, out = Tiny(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for _ in range(5):
            x = torch.randint(0, 150, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x * 7 + 3) % 150).backward()
            optimizer.step()
        out.append(flatten(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})))
    return out[0], out[1]


def assert_agreed(found: Sequence[Saved]) -> None:
    """All ranks say the same of what was lost, and boxes of one tensor have the same centers, or the same columns."""
    for one in found:
        assert all(loss == one.loss[0] for loss in one.loss)
        for name in one.tensors:
            origins = [kept.symbols.get(name) for kept in one.kept if name in kept.flat.tensors]
            full = [x for x in origins if x is not None and x.codes.numel()]
            assert len({type(x) for x in full}) <= 1
            if full and isinstance(full[0], Symbols):
                assert all(torch.equal(x.centers, full[0].centers) for x in full)
            elif full and isinstance(full[0], Points):
                assert len({(x.lattice.law, x.lattice.step) for x in full}) == 1


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_on_several_ranks_become_what_the_whole_tensors_would(name):
    expected, found = whole(SCHEMES[name](), run()), saved(SCHEMES[name], run(), 3)
    assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]
    assert_agreed(found)


@pytest.mark.parametrize("name", ["fisher by budget", "inshrinkerator", "cnr", "qd", "lc", "excp as released", "scar"])
def test_columns_on_several_ranks_become_what_the_whole_tensors_would(name):
    expected, found = whole(SCHEMES[name](), run()), saved(SCHEMES[name], run(), 2, columns)
    for a, b in zip(expected, found, strict=True):
        dithered = {n for n, x in a.kept[0].symbols.items() if isinstance(x, Points) and x.lattice.seed}
        assert {*other(a, b)} <= dithered
        for n in other(a, b):  # another dither, on the same steps
            x, steps = a.kept[0].symbols[n], a.tensors[a.kept[0].symbols[n].other or n]
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
@pytest.mark.parametrize("name", SCHEMES)
def test_boxes_on_a_gpu_are_decided_as_those_on_the_host_are_stored(name):
    flats = [replace(flat, tensors={n: x.cuda() for n, x in flat.tensors.items()}) for flat in run()]
    found = saved(SCHEMES[name], flats, 2)
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
            tensors[mine], places[mine] = piece, Shard(name, tuple(x.shape), offsets)
            infos[mine] = replace(part.flat.infos[name], name=mine, shape=tuple(piece.shape))
    optim = {
        f"{name}@{i}": replace(facts, moment1=f"{facts.moment1}@{i}", moment2=f"{facts.moment2}@{i}")
        for name, facts in part.flat.optim.items()
        for i in range(1 + (name in names))
    }
    flat = FlatState(None, tensors, infos, optim)
    kept = settle(sp.Fisher(**dial), flat, None, Shards(places, lambda thing: [thing])).quantize(flat, None)
    (expected,) = whole(sp.Fisher(**dial), run()[:1])
    assert other(expected, Saved(joined([(kept.flat.tensors, places)]), [], [])) == []


def test_a_process_that_is_alone_decides_as_without_shards():
    for make in SCHEMES.values():
        expected, found = whole(make(), run()), saved(make, run(), 1)
        assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]
        assert [one.loss for one in expected] == [one.loss for one in found]


def test_after_a_restore_the_dither_is_that_of_the_whole():
    (first, *_) = whole(sp.Fisher(relative_error=0.2), run()[:1])

    def make() -> Scheme:
        scheme = sp.Fisher(relative_error=0.2)
        scheme.resume(first.loss[0], generation=3)
        return scheme

    expected, found = whole(make(), run()), saved(make, run(), 4)
    seeds = {one.lattice.seed for one in found[0].kept[1].symbols.values() if isinstance(one, Points)}
    assert len(seeds) > 10
    assert [other(a, b) for a, b in zip(expected, found, strict=True)] == [[], []]


def test_after_a_restore_inshrinkerator_rounds_boxes_by_chance_of_their_own():
    def make() -> Scheme:
        scheme = sp.Inshrinkerator(config=PRUNED)
        scheme.resume(None, generation=1)
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
    for name, one in expected.kept[0].symbols.items():
        x = run()[0].tensors[name]
        apart = joined(
            [
                (
                    {name: (kept.symbols[name].codes == 0).to(torch.uint8)},
                    {name: Shard(name, tuple(x.shape), rows(tuple(x.shape), 3, rank)[0])},
                )
                for rank, kept in enumerate(found.kept)
            ]
        )[name]
        assert torch.equal(apart != 0, one.codes == 0)
        wanted, made = (float((all_of.tensors[name] - x).abs().sum()) for all_of in (expected, found))
        assert made <= 1.03 * wanted


@pytest.mark.parametrize("order", ["round robin", "random"])
def test_scar_writes_as_many_values_in_any_order(order):
    expected, found = (
        whole(sp.SCAR(order=order), run())[1], saved(lambda: sp.SCAR(order=order), run(), 3)[1]
    )  # fmt: skip
    old = run()[0].tensors
    changed = [
        sum(int((one.tensors[n] != old[n]).sum()) for n in expected.kept[0].symbols) for one in (expected, found)
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
            names[name]: replace(one, moment1=names[one.moment1], moment2=names[one.moment2])
            for name, one in flat.optim.items()
        },
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_moments_on_another_rank_than_their_weight_still_tell_of_it(shift):
    """As where replicas share what they save by size. Adam's bias is known of those weights that lie beside theirs."""
    flat = fully_qualified(run()[0])
    lone = {name: (i + shift) % 2 for i, name in enumerate(flat.tensors)}
    (expected,), (found,) = (
        whole(sp.Fisher(relative_error=0.2), [flat]), saved(lambda: sp.Fisher(relative_error=0.2), [flat], 2, lone=lone)
    )  # fmt: skip
    assert_agreed([found])
    weights = {name for name, info in flat.infos.items() if info.role is Role.PARAMETER}
    steps = [
        {name: kept.symbols[name].lattice for one in saves.kept for kept in [one] for name in weights & {*kept.symbols}}
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
        whole(sp.Fisher(relative_error=0.1), [flat]), saved(lambda: sp.Fisher(relative_error=0.1), [flat], 4)
    )  # fmt: skip
    assert [kept.flat.tensors["model/a.weight"].shape[0] for kept in found.kept] == [2, 2, 1, 0]
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
        assert all("model/up.weight" not in kept.symbols for kept in found.kept)
        assert "model/down.weight" in found.kept[0].symbols
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
        def on(rank, gather):
            scheme, reference = make(), None
            for i, mine in enumerate(one[rank] for one in parts):
                held = None if rank == 1 and i == 1 else reference
                made = settle(scheme, mine.flat, held, Shards(mine.places, gather))
                kept = made.quantize(mine.flat, held)
                reference = after(kept, mine.flat)
            return kept

        return on

    for kept in Ranks(2).all(work(sp.LCCheckpoint)):
        assert not kept.symbols and kept.loss is None
    found = Ranks(2).all(work(lambda: sp.Fisher(terms=64)))
    (expected,) = whole(sp.Fisher(terms=64), run()[1:])
    made = joined([(kept.flat.tensors, parts[1][rank].places) for rank, kept in enumerate(found)])
    weights = {name for name, info in run()[1].infos.items() if info.role is Role.PARAMETER}
    assert not weights & {*other(expected, Saved(made, [], []))}


# what is measured


class Parts(nn.Module):
    """What a rank has of a model: its boxes are the parameters."""

    def __init__(self, flat: FlatState) -> None:
        super().__init__()
        self.names = [name for name, info in flat.infos.items() if info.role is Role.PARAMETER]
        self.all = nn.ParameterList([nn.Parameter(flat.tensors[name], requires_grad=False) for name in self.names])
        self.best = [x.detach().clone() for x in self.all]


def bowl(model: Parts) -> float:
    """1 and the mean squared distance to where it began, of some parameters more than of others."""
    model.eval()
    sums = (
        (1 + i % 3) * float((x - best).double().square().sum())
        for i, (x, best) in enumerate(zip(model.all, model.best, strict=True))
    )
    return 1 + sum(sums) / 1000


def measured(make: Any, width: int) -> tuple[list[Saved], list[Any]]:
    """A chain of checkpoints whose loss all ranks measure: each that of its part, as many times as there are ranks."""
    flats = [copy.deepcopy(flat) for flat in run()]
    models: list[Parts] = []

    def target(part: Part) -> ShardTarget:
        models.append(Parts(part.flat))
        return ShardTarget(part.flat, lambda model: 1 + width * (bowl(model) - 1), models[-1])

    found = saved(make, flats, width, target=target)
    for model in models:
        assert model.training and all(map(torch.equal, model.all, model.best))
    return found, models


@pytest.mark.parametrize(
    "options",
    [{"budget": 0.05}, {"budget": "2%"}, {"relative_error": 0.2}],
    ids=str,
)
def test_all_ranks_measure_the_same_trials_together(options):
    def make() -> Scheme:
        return sp.Fisher(evaluate=lambda model: bowl(model), **options)

    (one, two), (three, four) = measured(make, 1)[0], measured(make, 3)[0]
    assert [other(one, three), other(two, four)] == [[], []]
    assert_agreed([three, four])
    assert one.loss[0]["tried"] and three.loss[0]["rise"] == pytest.approx(one.loss[0]["rise"], rel=1e-6)


def test_a_search_of_several_ranks_chooses_what_one_would():
    def make() -> Scheme:
        return sp.CNR(threshold=0.02, evaluate=bowl)

    (one, two), (three, four) = measured(make, 1)[0], measured(make, 3)[0]
    assert [other(one, three), other(two, four)] == [[], []]
    assert one.loss[0]["chosen"] == three.loss[0]["chosen"] and two.loss[0]["chosen"] == four.loss[0]["chosen"]
    assert_agreed([three, four])


def test_where_nothing_is_known_of_weights_all_ranks_ask_for_it_together():
    plain = [flatten({"model": state_of(flat)}) for flat in run()[:1]]

    def make() -> Scheme:
        return sp.Fisher(budget=0.05, evaluate=bowl)

    def chain(width: int) -> Saved:
        def target(part: Part) -> ShardTarget:
            return ShardTarget(part.flat, lambda model: 1 + width * (bowl(model) - 1), Parts(part.flat))

        return saved(make, copy.deepcopy(plain), width, target=target)[0]

    one, three = chain(1), chain(3)
    assert one.loss[0]["probed"].keys() == three.loss[0]["probed"].keys() and len(one.loss[0]["probed"]) > 3
    assert one.loss[0]["probed"] == pytest.approx(three.loss[0]["probed"], rel=1e-4)
    assert other(one, three) == []
    assert_agreed([three])


def state_of(flat: FlatState) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model/"): x for name, x in flat.tensors.items() if name.startswith("model/")}


class Recorder:
    """Squares of gradients, by the names of the model; of boxes, or of all of it."""

    ready = True

    def __init__(self, square: dict[str, torch.Tensor]) -> None:
        self.square = self.mean = square


@pytest.mark.parametrize("by_box", [False, True])
def test_squares_that_were_recorded_are_those_of_the_boxes(by_box):
    weights = state_of(run()[0])
    flat = flatten({"model": weights})
    squares = {name: x.detach().square() + 0.1 for name, x in weights.items()}
    parts = cut(flat, 3)

    def settled(rank, gather):
        mine = parts[rank]
        given = squares
        if by_box:
            given = {name: box_of(x, *rows(tuple(x.shape), 3, rank)) if x.dim() else x for name, x in squares.items()}
        scheme = sp.Fisher(terms=64, gradients=Recorder(given))
        return settle(scheme, mine.flat, None, Shards(mine.places, gather)).quantize(mine.flat, None)

    found = Ranks(3).all(settled)
    made = joined([(kept.flat.tensors, parts[rank].places) for rank, kept in enumerate(found)])
    known = {f"model/{name}": Curvature(matrix(x)) for name, x in squares.items()}
    steps = whole_steps(flat, known)
    for name, lattice in steps.items():
        x, kept = flat.tensors[name], found[0].symbols[name]
        part = Shard(name, tuple(x.shape), (0,) * x.dim()).cut(lattice, tuple(kept.codes.shape))
        moved = kept.lattice.rows.int() - part.rows.int()
        assert torch.equal(kept.lattice.columns, part.columns) and len({*moved.tolist()}) <= 2  # the size; a cap
    assert {*made} == {*flat.tensors}


def whole_steps(flat: FlatState, known: dict[str, Curvature]) -> dict[str, Any]:
    weights = {name: x for name, x in flat.tensors.items() if name in known and x.numel() >= 16 and x.dim()}
    return Drafts(weights, {name: known[name] for name in weights}, None, None, 0, 0).steps


# what is refused


def silent(_: Any) -> list[Any]:
    raise AssertionError("a rank waited for others")


class Strange:
    """A scheme of somebody else's."""

    id = "strange"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Strange, "several ranks can decide"),
        (lambda: sp.Fisher(evaluate=bowl), "no model that is saved"),
        (lambda: sp.CNR(evaluate=bowl), "no model that is saved"),
        (lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}, group=object()), "share the trials"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_any_rank_waits(make, match):
    part = cut(run()[0], 2)[0]
    with pytest.raises(PolicyError, match=match):
        settle(make(), part.flat, None, Shards(part.places, silent))
    with pytest.raises(PolicyError, match=match):
        check(make())


def test_lossless_waits_for_nobody():
    part, scheme = cut(run()[0], 2)[0], sp.Lossless()
    check(scheme)
    assert settle(scheme, part.flat, None, Shards(part.places, silent)) is scheme


def test_ranks_with_different_schemes_are_told_so():
    parts = cut(run()[0], 2)

    def work(rank, gather):
        return settle(sp.Fisher(ratio=10 + rank), parts[rank].flat, None, Shards(parts[rank].places, gather))

    errors = Ranks(2).run(work)
    assert all(isinstance(one, MismatchError) and "ratio=10.0" in str(one) for one in errors)


def test_a_model_that_shares_no_memory_with_what_is_saved_is_refused_on_all_ranks():
    parts = cut(run()[0], 2)

    def work(rank, gather):
        mine = parts[rank]
        target = ShardTarget(mine.flat, bowl, Parts(copy.deepcopy(mine.flat)))
        return settle(sp.Fisher(evaluate=bowl), mine.flat, None, Shards(mine.places, gather), target)

    assert all(isinstance(one, PolicyError) and "share memory" in str(one) for one in Ranks(2).run(work))


def test_a_tied_weight_is_measured_and_written_once_though_it_has_two_names():
    flat = copy.deepcopy(run()[0])
    names = {"model/wte.weight": "model/tied.weight"}
    for name, twin in names.items():
        flat.tensors[twin], flat.infos[twin] = flat.tensors[name], replace(flat.infos[name], name=twin)
    parts = cut(flat, 2)
    for part in parts:  # one memory, as in a model
        part.flat.tensors["model/tied.weight"] = part.flat.tensors["model/wte.weight"]

    def work(rank, gather):
        mine = parts[rank]
        target = ShardTarget(mine.flat, bowl, Parts(mine.flat))
        assert {"model/wte.weight", "model/tied.weight"} <= target.alive
        made = settle(sp.Fisher(budget=0.05, evaluate=bowl), mine.flat, None, Shards(mine.places, gather), target)
        return made.quantize(mine.flat, None)

    for kept in Ranks(2).all(work):
        assert torch.equal(kept.flat.tensors["model/tied.weight"], kept.flat.tensors["model/wte.weight"])
        assert "model/wte.weight" in kept.symbols and "model/tied.weight" not in kept.symbols


def test_replicas_of_which_each_saves_a_part_are_not_measured():
    """A trial's values would be on the rank that saves them, and the other ranks would measure old ones."""
    flat = flatten({"model": {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64, 64)}})
    parts = cut(flat, 2, lone={"model/a.weight": 0, "model/b.weight": 1})

    def work(rank, gather):
        mine = parts[rank]
        names = {name: mine.flat.tensors.get(name, torch.zeros(64, 64)) for name in flat.tensors}
        replica = nn.ModuleDict({name[6]: nn.Linear(64, 64, bias=False) for name in names})
        for name, x in names.items():
            replica[name[6]].weight = nn.Parameter(x, requires_grad=False)
        return settle(
            sp.Fisher(evaluate=bowl),
            mine.flat,
            None,
            Shards(mine.places, gather),
            ShardTarget(mine.flat, bowl, replica),
        )

    first, second = Ranks(2).run(work)
    assert isinstance(first, PolicyError) and "b.weight" in str(first) and str(first) == str(second)


@pytest.mark.parametrize("name", ["fisher by error", "inshrinkerator", "excp"])
def test_what_goes_wrong_on_one_rank_is_raised_by_all(name):
    parts = cut(run()[0], 3)
    broken = parts[1].flat
    tensors = broken.tensors | {"model/up.weight": torch.zeros(99, 64)}
    parts[1].flat = replace(broken, tensors=tensors)

    def work(rank, gather):
        mine = parts[rank]
        return settle(SCHEMES[name](), mine.flat, None, Shards(mine.places, gather))

    assert all(isinstance(one, StateError) and "up.weight" in str(one) for one in Ranks(3).run(work))


def test_an_evaluate_that_raises_on_one_rank_is_raised_by_all():
    parts = cut(copy.deepcopy(run()[0]), 2)

    def work(rank, gather):
        def evaluate(model):
            if rank == 1:
                raise ZeroDivisionError("batch 7")
            return bowl(model)

        mine = parts[rank]
        target = ShardTarget(mine.flat, evaluate, Parts(mine.flat))
        return settle(sp.Fisher(evaluate=bowl), mine.flat, None, Shards(mine.places, gather), target)

    first, second = Ranks(2).run(work)
    assert isinstance(first, PolicyError) and isinstance(second, PolicyError)
    assert "rank 1" in str(first) and "batch 7" in str(first) and "batch 7" in str(second)


# what crosses


@pytest.mark.parametrize("name", ["fisher by budget", "inshrinkerator", "lc", "excp"])
def test_what_ranks_tell_each_other_is_small(name):
    """Sums by row and by column, and sketches: of a weight of a million values, a thousandth of the state, or so."""
    torch.manual_seed(3)
    flats = [flatten({"model": {"a.weight": torch.randn(1024, 1024) + i}}) for i in (0, 0.01)]
    ranks = Ranks(2)
    saved(SCHEMES[name], flats, 2, ranks=ranks)
    assert ranks.nbytes / 2 < 0.02 * flats[0].nbytes
    assert ranks.rounds < 100


def test_a_state_with_nothing_to_quantize_is_written_as_it_is():
    flat = flatten({"model": {"a.weight": torch.arange(12).reshape(4, 3)}, "step": torch.tensor(3)})
    for make in SCHEMES.values():
        (found,) = saved(make, [flat], 3)
        assert all(torch.equal(x, flat.tensors[name]) for name, x in found.tensors.items())
        assert_agreed([found])


def test_a_rank_with_nothing_takes_part():
    flat = run()[0]
    lone = dict.fromkeys(flat.tensors, 0)
    for make in (SCHEMES["fisher by budget"], SCHEMES["inshrinkerator"], SCHEMES["excp"]):
        (expected,), (found,) = whole(make(), [flat]), saved(make, [flat], 2, lone=lone)
        assert other(expected, found) == [] and not found.kept[1].flat.tensors
        assert_agreed([found])


def test_a_box_beyond_its_tensor_is_refused_on_all_ranks():
    parts = cut(run()[0], 2)
    place = parts[1].places["model/up.weight"]
    parts[1].places["model/up.weight"] = replace(place, offsets=(90, 0))

    def work(rank, gather):
        return settle(sp.LCCheckpoint(), parts[rank].flat, None, Shards(parts[rank].places, gather))

    assert all(isinstance(one, StateError) and "up.weight" in str(one) for one in Ranks(2).run(work))
