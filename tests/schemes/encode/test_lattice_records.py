"""A state with tensors on lattices becomes records that a reader turns into the same values, codes and lattices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.codebooks import Rounding
from helpers.lattice_records import File, alike, lattice_of, nearest, points_of, put, same_reference, settled, zeros
from helpers.round_trip import Loop
from helpers.strategies import bits

import shrinkpoint as sp
from shrinkpoint import Lossless
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.schemes import QuantizationPlan, Recode
from shrinkpoint.schemes.encode.record_groups import MAX_SHARED_NUMEL
from shrinkpoint.tensors.flat_state import flatten, unflatten

FIRST, SECOND = "optimizer/state/2/exp_avg", "optimizer/state/2/exp_avg_sq"


def fisher(**options: Any) -> sp.Fisher:
    return sp.Fisher(**{"relative_error": 0.05, **options})


# what stands where


def test_a_training_loop_comes_back_as_a_chain():
    loop, scheme, file = Loop(), fisher(), None
    for depth in range(4):
        file = put(loop.steps(3), scheme, file)
        kinds = {name: kind for name, kind in file.kinds().items() if flatten(loop.state()).infos[name].numel >= 16}
        assert {*kinds.values()} <= {"gridded", "same"} and [*kinds.values()].count("gridded") > 10
        based = {recipe.get("base", False) for recipe in file.recipes().values() if recipe.get("law") == "linear"}
        assert based == {depth > 0}
        inherited = [one.get("inherited", False) for one in file.recipes().values() if one.get("law") == "linear"]
        assert all(inherited) == (depth > 0)


def test_second_moments_stand_before_the_first_ones_that_are_relative_to_them():
    file = put(Loop().steps(3), fisher())
    places = {info.name: i for i, record in enumerate(file.records()) for info in record.infos}
    firsts = [name for name, kind in file.kinds().items() if name.endswith("exp_avg") and kind == "gridded"]
    assert len(firsts) == 5
    assert all(places[name + "_sq"] < places[name] for name in firsts)
    recipes = file.recipes()
    assert {recipes[name]["law"] for name in firsts} == {"relative"}
    assert {recipes[name + "_sq"]["law"] for name in firsts} == {"log"}
    ordinals = [info.name for record in file.records() for info in record.infos]
    (record,) = [record for record in file.records() if record.recipe.get("law") == "relative"]
    start, step, count = record.recipe["others"][0]
    named = [ordinals[start + step * i] for i in range(count)]
    assert named == [info.name + "_sq" for info in record.infos][:count]


def test_weights_that_stay_exact_are_coded_under_moments_that_are_points():
    """Which come first, then, and in the order in which they need each other."""
    loop, file = Loop(width=700), None
    for step in (3, 1):
        flat = flatten(loop.steps(step))
        points = {name: one for name, one in fisher().plan(flat, None).quantized.items() if name.startswith("optim")}
        file = put(loop.state(), settled(points), file)  # type: ignore[arg-type]
    recipe, names = file.recipes()["model/2.weight"], [name for one in file.records() for name in names_of(one)]
    assert recipe["kind"] == "coded" and recipe["moments"]
    places = [names.index(name) for name in (SECOND, FIRST, "model/2.weight")]
    assert places == sorted(places)


def test_a_weight_stays_exact_while_its_second_moment_is_the_parents_and_others_are_not():
    """Its first moment shares a record with those that are relative to second moments of this file."""
    loop, file, second = Loop(), None, None
    for _ in range(2):
        points = dict(fisher().plan(flatten(loop.steps(3)), None).quantized)
        del points["model/2.weight"]
        points[SECOND] = second = second or points[SECOND]
        file = put(loop.state(), settled(points), file)  # type: ignore[arg-type]
    assert file is not None and file.kinds()[SECOND] == "same"
    assert file.recipes()["model/2.weight"]["moments"]
    names = [name for record in file.records() for name in names_of(record)]
    assert names.index(FIRST) < names.index("model/2.weight")


def names_of(record: Any) -> list[str]:
    return [info.name for info in record.infos]


def test_small_tensors_with_lattices_of_one_kind_share_a_record_and_others_do_not():
    points = {f"{i}.weight": points_of("linear", (20, 30), random=i, seed=i) for i in range(3)}
    points |= {f"l{i}.weight": points_of("log", (20, 30), step=24) for i in range(2)}
    points |= {"s.weight": points_of("log", (20, 30), step=25), "big.weight": points_of("linear", (MAX_SHARED_NUMEL,))}
    state = zeros(points)
    points["half.weight"] = points_of("linear", (20, 30))
    state["half.weight"] = torch.zeros(20, 30).bfloat16()
    file = put(state, settled(points))
    records = sorted(sorted(info.name for info in record.infos) for record in file.records())
    assert records == [
        ["0.weight", "1.weight", "2.weight"],
        ["big.weight"],
        ["half.weight"],
        ["l0.weight", "l1.weight"],
        ["s.weight"],
    ]


def test_new_tensors_do_not_keep_those_that_have_a_parent_from_it():
    points = {name: points_of("linear", (20, 30), random=i) for i, name in enumerate("ab")}
    first = put(zeros(points), settled(points))
    now = {name: replace(one, codes=one.codes + 1) for name, one in points.items()}
    now |= {"c": points_of("linear", (20, 30)), "b": points_of("linear", (30, 20))}
    recipes = put(zeros(now), settled(now), first).recipes()
    assert {name: recipe.get("base", False) for name, recipe in recipes.items()} == {"a": True, "b": False, "c": False}
    wide = {"a": now["a"]}
    assert "base" not in put(zeros(wide, torch.float16), settled(wide), first).recipes()["a"]


def test_one_changed_lattice_does_not_cost_the_others_theirs():
    points = {name: points_of("linear", (20, 30), random=i) for i, name in enumerate("abc")}
    first = put(zeros(points), settled(points))
    now = {name: replace(one, codes=one.codes + 1) for name, one in points.items()}
    now["b"] = replace(now["b"], lattice=lattice_of("linear", (20, 30), at=9))
    recipes = put(zeros(now), settled(now), first).recipes()
    inherited = {name: recipe.get("inherited", False) for name, recipe in recipes.items()}
    assert inherited == {"a": True, "b": False, "c": True}


# what has not changed


def test_what_has_not_changed_is_not_written_again_and_its_points_live_on():
    points = {name: points_of("linear", (20, 30), random=i) for i, name in enumerate("ab")}
    first = put(zeros(points), settled(points))
    second = put(zeros(points), settled({**points, "b": replace(points["b"], codes=points["b"].codes + 1)}), first)
    assert second.kinds() == {"a": "same", "b": "gridded"}
    reread = second.read().quantized["a"]
    assert isinstance(reread, LatticeTensor) and alike(reread, points["a"])
    third = put(zeros(points), settled({**points, "a": replace(points["a"], codes=points["a"].codes - 1)}), second)
    assert third.recipes()["a"]["inherited"] is True


def test_equal_values_on_another_lattice_are_not_the_same():
    """Else a reader would go on with a lattice that the writer does not have, and the next delta would not decode."""
    lattice_tensor = points_of("linear", (20, 30), "none")
    first = put(zeros({"w": lattice_tensor}), settled({"w": lattice_tensor}))
    other = replace(lattice_tensor, lattice=lattice_of("linear", (20, 30), at=8))
    second = put(zeros({"w": lattice_tensor}), settled({"w": other}), first)
    assert second.kinds() == {"w": "gridded"}
    for third in (lattice_tensor, other, replace(other, codes=other.codes + 1)):
        put(zeros({"w": lattice_tensor}), settled({"w": third}), second)


def test_a_lossless_file_of_what_a_lossy_one_holds_carries_its_points_on():
    loop = Loop()
    first = put(loop.steps(2), fisher())
    restored = unflatten(flatten(loop.state()).tree, first.read().tensors)
    second = put(restored, Lossless(), first)
    assert {*second.kinds().values()} == {"same"}
    assert second.read().quantized.keys() == first.read().quantized.keys()
    scheme = fisher()
    scheme.resume({"scheme": "fisher", "size": 8 * -3})
    assert "base" in put(loop.steps(2), scheme, second).recipes()["model/2.weight"]


def test_again_loses_nothing_more_and_keeps_the_points():
    loop, scheme = Loop(), fisher()
    first = put(loop.steps(2), scheme)
    second = put(loop.steps(2), scheme, first)
    reread = second.read()
    state = unflatten(flatten(loop.state()).tree, reread.tensors)
    for parent in (None, first, second):
        again = put(state, Recode(reread.quantized, {"chosen": {}}), parent)
        assert same_reference(again.read(), reread)
    assert len(put(state, Recode(reread.quantized), first).data) < 1.1 * len(second.data)


# on parents of other schemes, and below them


CONFIG = {"bins": 8, "embedding_bins": 32, "prune": 0.2, "protect": 0.005}
OTHERS = {
    "lossless": Lossless,
    "codes": Rounding,
    "inshrinkerator": lambda: sp.Inshrinkerator(config=CONFIG),
    "lc-checkpoint": lambda: sp.LCCheckpoint(bits=3),
}


def test_points_cost_less_on_any_parent_that_is_near():
    """What a parent is made of does not matter: a value that is near its place before is."""
    x = torch.randn(100, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    state, later = {"w.weight": x}, {"w.weight": x + 1e-4}
    alone = len(put(later, fisher()).data)
    sizes = {other: len(put(later, fisher(), put(state, OTHERS[other]())).data) for other in ("lossless", "codes")}
    assert sizes["lossless"] < 0.5 * alone and sizes["codes"] < alone


def test_ties_casts_and_equal_tensors_stay_what_they_are():
    master = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    state = {"master": master, "tied": master, "row": master[3], "half": master.bfloat16(), "small": master.half()}
    points = {"master": nearest(master, lattice_of("linear", (20, 30), at=-16, seed=3))}
    (name,) = (name for name, info in flatten(state).infos.items() if info.shape == (20, 30) and info.dtype == "F32")
    file = put(state, settled({name: points["master"]}, cast_sources={"half": name, "small": name}))
    assert file.kinds() == {name: "gridded", "half": "copy", "small": "copy"}
    values = points["master"].dequantize(torch.float32)
    back = unflatten(flatten(state).tree, file.read().tensors)
    assert bits(back["half"]) == bits(values.bfloat16()) and bits(back["row"]) == bits(values[3])
    back["tied"][3, 4] = 42
    assert back["master"][3, 4] == back["row"][4] == 42


def test_a_file_that_ends_early_or_has_a_byte_turned_does_not_load():
    loop = Loop()
    whole = put(loop.steps(1), fisher())
    for offset in range(0, len(whole.data), 997):
        turned = bytearray(whole.data)
        turned[offset] ^= 16
        for data in (whole.data[:offset], bytes(turned)):
            with pytest.raises(sp.errors.ShrinkpointError):
                File(data, None).read()


def test_a_scheme_that_keeps_other_values_than_its_points_does_not_become_a_file():
    lattice_tensor = points_of("linear", (20, 30))

    class Liar(QuantizationPlan):
        def quantize(self, flat: Any, reference: Any) -> Any:
            quantized_state = super().quantize(flat, reference)
            return replace(quantized_state, state=flat)

    with pytest.raises(ValueError, match="other values"):
        put({"w": torch.ones(20, 30)}, Liar("liar", {"w": lattice_tensor}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_points_of_a_state_on_a_gpu_are_those_of_one_on_the_cpu():
    points = {"w": points_of("linear", (20, 30), seed=3), "p": points_of("log", (20, 30), step=24)}
    on_gpu = {name: x.cuda() for name, x in zeros(points).items()}
    assert put(on_gpu, settled(points)).data == put(zeros(points), settled(points)).data
