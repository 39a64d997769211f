"""A state with quantized tensors in it becomes records that a reader turns into the same values and symbols."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers.codebooks import Rounding, alike, moved, symbols_of
from helpers.lattice_records import put, same_reference, settled, zeros
from helpers.round_trip import Loop

from shrinkpoint import Lossless
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.schemes import QuantizedState, Recode
from shrinkpoint.schemes.encode.record_groups import MAX_BUNDLE_NUMEL, MAX_SHARED_NUMEL
from shrinkpoint.tensors.flat_state import flatten, unflatten


@pytest.mark.parametrize("coder", [*CODERS, "all"])
def test_a_training_loop_comes_back_through_every_coder(coder):
    loop, scheme = Loop(), Rounding(coders=CODERS if coder == "all" else (coder,))
    file = None
    for _ in range(3):
        file = put(loop.steps(2), scheme, file)
        assert {kind for name, kind in file.kinds().items() if name.startswith("model/")} <= {"quantized", "same"}


def test_only_the_coders_that_are_asked_for_are_used():
    before, after = (Loop().steps(n) for n in (1, 3))
    found = {}
    for coder in CODERS:
        scheme = Rounding(coders=(coder,))
        recipes = put(after, scheme, put(before, scheme)).recipes().values()
        found[coder] = {next(iter(one["codes"])) for one in recipes if one["kind"] == "quantized"}
        based = {one.get("base", False) for one in recipes if one["kind"] == "quantized"}
        assert based == {coder not in ("alone", "packed")}
    assert found.pop("packed") == {"packed"}
    assert found.pop("context") == found.pop("alone") == {"run"}
    assert all(one == {"cyclic"} for one in found.values())


def test_weights_are_coded_under_the_moments_of_the_same_file():
    loop, scheme = Loop(width=1500, lr=0.1), Rounding(bins=8)
    before = put(loop.steps(3), scheme)
    recipes = put(loop.steps(1), scheme, before).recipes()
    assert any(one.get("moments") for name, one in recipes.items() if name.startswith("model/"))


def test_small_tensors_with_equally_many_centers_share_a_record_and_others_do_not():
    symbols = {f"{i}.weight": symbols_of((20, 30), bins, seed=i) for i, bins in enumerate([4, 4, 4, 6, 6])}
    symbols |= {"z.weight": symbols_of((MAX_SHARED_NUMEL,), 4), "f.weight": symbols_of((20, 30), 4, first=1)}
    symbols |= {"e.weight": symbols_of((20, 30), 4, exact=torch.float32)}
    file = put(zeros(symbols), settled(symbols))
    records = [{info.name for info in record.infos} for record in file.records()]
    assert sorted(map(len, records)) == [1, 1, 1, 2, 3]
    assert {"0.weight", "1.weight", "2.weight"} in records


def test_a_record_that_small_tensors_share_is_full_at_some_size():
    """To read one of them its whole record is decoded."""
    symbols = {f"{i}.weight": symbols_of((200, 300), 4, seed=i) for i in range(2 * MAX_BUNDLE_NUMEL // 60000)}
    file = put(zeros(symbols), settled(symbols))
    numels = [sum(info.numel for info in record.infos) for record in file.records()]
    assert len(numels) == 2 and max(numels) <= MAX_BUNDLE_NUMEL
    read = file.read().quantized
    assert all(alike(read[name], one) for name, one in symbols.items())


def test_what_has_not_changed_is_not_written_again_and_its_symbols_live_on():
    symbols = {"a.weight": symbols_of((20, 30), 4), "b.weight": symbols_of((20, 30), 4, seed=1)}
    first = put(zeros(symbols), settled(symbols))
    second = put(zeros(symbols), settled({**symbols, "b.weight": moved(symbols["b.weight"])}), first)
    third = put(zeros(symbols), settled({**symbols, "a.weight": moved(symbols["a.weight"])}), second)
    assert second.kinds() == {"a.weight": "same", "b.weight": "quantized"}
    assert "base" in third.recipes()["a.weight"]
    assert alike(second.read().quantized["a.weight"], symbols["a.weight"])


def test_equal_values_of_other_symbols_are_not_the_same():
    """Else a reader would go on with symbols that the writer does not have, and the next delta would not decode."""
    one = symbols_of((20, 30), 6, special=0.3, spread=0.5)
    used = int(one.codes.max()) - one.first_code + 1
    fewer = CodebookTensor(one.codes, one.centers[:used].clone(), one.exact)
    other = CodebookTensor(one.codes, torch.cat([one.centers[:used], one.centers[used:] + 1]), one.exact)
    wide = CodebookTensor(one.codes, one.centers, one.exact.float())
    for now in (fewer, other, wide):
        first = put(zeros({"w": one}), settled({"w": one}))
        second = put(zeros({"w": one}), settled({"w": now}), first)
        assert alike(second.read().quantized["w"], now)
        for third in (one, now, moved(now)):
            put(zeros({"w": one}), settled({"w": third}), second)


def test_a_tensor_that_changed_its_dtype_or_shape_has_no_parent():
    one = symbols_of((20, 30), 4)
    first = put(zeros({"w": one}), settled({"w": one}))
    turned = CodebookTensor(one.codes.reshape(30, 20), one.centers, one.exact)
    halves = [(zeros({"w": one}, dtype), one) for dtype in (torch.float16, torch.bfloat16)]
    for state, symbols in (*halves, (zeros({"w": turned}), turned)):
        recipes = put(state, settled({"w": symbols}), first).recipes()
        assert recipes["w"]["kind"] == "quantized" and "base" not in recipes["w"]


def test_a_lossless_file_of_what_a_lossy_one_holds_carries_its_symbols_on():
    loop, lossy = Loop(), Rounding()
    state = loop.steps(1)
    first = put(state, lossy)
    second = put(lossy.expected(state), Lossless(), first)
    assert {*second.kinds().values()} == {"same"}
    assert second.read().quantized.keys() == first.read().quantized.keys()
    assert "base" in put(loop.steps(1), lossy, second).recipes()["model/2.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_equal_to_a_quantized_one_are_copies_and_never_casts_of_a_narrow_one(dtype):
    """A writer may only cast what a reader does: from 32 bits."""
    centers = torch.tensor([-0.5, 0.25, 1.0])
    one = CodebookTensor(symbols_of((20, 30), 3, first=0).codes, centers, torch.empty(0).bfloat16(), 0)
    others = {str(other): one.dequantize(other) for other in (torch.float32, torch.bfloat16, torch.float16)}
    file = put({"w": torch.zeros(20, 30, dtype=dtype), "others": others}, settled({"w": one}))
    assert file.kinds()[f"others/{dtype}"] == "copy"


def test_again_loses_nothing_more_and_keeps_the_symbols():
    loop = Loop()
    first = put(loop.steps(1), Rounding())
    second = put(loop.steps(1), Rounding(), first)
    reread = second.read()
    state = unflatten(flatten(loop.state()).tree, reread.tensors)
    for parent in (None, first):
        again = put(state, Recode(reread.quantized, {"chosen": {}}), parent)
        assert same_reference(again.read(), reread)


@dataclass(frozen=True)
class Liar:
    """A scheme whose symbols stand for other values than it keeps."""

    symbols: dict[str, CodebookTensor] = field(default_factory=dict)
    id: str = "liar"

    def quantize(self, flat: Any, reference: Any) -> QuantizedState:
        return QuantizedState(replace(flat, tensors={name: x + 1 for name, x in flat.tensors.items()}), self.symbols)

    encode = Lossless().encode


def test_a_scheme_that_keeps_other_values_than_its_symbols_does_not_become_a_file():
    one = symbols_of((20, 30), 4)
    with pytest.raises(ValueError, match="other values"):
        put({"w": one.dequantize(torch.float32)}, Liar({"w": one}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_a_gpu_gives_the_same_file():
    state = Loop().steps(2)
    on_gpu = unflatten(flatten(state).tree, {name: x.cuda() for name, x in flatten(state).tensors.items()})
    for optimizer in ("exact", "lossy", "reset"):
        symbols = {
            name: Rounding().symbols(x) for name, x in flatten(state).tensors.items() if name.startswith("model/")
        }
        scheme = settled(symbols, optimizer=optimizer)
        here, over = put(state, scheme), put(on_gpu, scheme)
        assert same_reference(here.read(), over.read())
        assert all(one.codes.device.type == "cpu" for one in over.reference.quantized.values())


def test_moments_without_values_lie_beside_others_of_their_kind():
    """As those of a rank that has no row of a small parameter."""
    generator = torch.Generator().manual_seed(6)
    shapes = [(0, 50), (80, 50), (40,)]
    slots = [
        {
            "exp_avg": torch.randn(shape, generator=generator) / 100,
            "exp_avg_sq": torch.rand(shape, generator=generator) / 1000,
        }
        for shape in shapes
    ]
    model = {f"layer.{index}.weight": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    groups = [{"params": [0, 1, 2], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    state = {"model": model, "optimizer": {"state": dict(enumerate(slots)), "param_groups": groups}}
    first = put(state, Lossless())
    put({**state, "model": {name: x + 0.01 for name, x in model.items()}}, Lossless(), first)
