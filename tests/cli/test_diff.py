"""`diff` compares bit for bit, and measures."""

from __future__ import annotations

import json
import math

import pytest
import torch

from shrinkpoint.store import Store
from shrinkpoint.tensors.compare import compare_tensors


def test_a_checkpoint_is_equal_to_itself(run, store, payload):
    done = run("diff", store, f"{store}@40")
    assert done.code == 0
    assert "equal bit for bit" in done.stdout
    assert run("diff", f"{store}@30", payload(30)).code == 0


def test_every_changed_tensor_and_value_is_listed_with_its_measures(run, store, state_at):
    done = run("diff", f"{store}@10", f"{store}@40", "--json")
    assert done.code == 1
    document = json.loads(done.stdout)
    rows = {one["name"]: one for one in document["tensors"]}
    a, b = (state_at(step)["model"]["weight"].double() for step in (10, 40))
    assert rows["frozen"]["equal"]
    assert not rows["model/weight"]["equal"]
    assert rows["model/weight"]["max_abs"] == pytest.approx(float((a - b).abs().max()))
    assert rows["model/weight"]["relative"] == pytest.approx(float((a - b).norm() / a.norm()))
    assert document["values"] == {"extra/epoch": ["0", "2"]}


def test_the_table_shows_only_what_differs_unless_asked(run, store):
    done = run("diff", f"{store}@10", f"{store}@20")
    assert "model/weight" in done.stdout
    assert "frozen" not in done.stdout
    assert "frozen" in run("diff", f"{store}@10", f"{store}@20", "--all").stdout


def test_added_missing_reshaped_and_recast_tensors_are_told(run, tmp_path):
    x = torch.ones(4)
    with Store(tmp_path / "a") as a, Store(tmp_path / "b") as b:
        a.save(1, {"gone": x, "shape": x.clone(), "dtype": x.clone()})
        b.save(1, {"new": x, "shape": x.reshape(2, 2), "dtype": x.half()})
    done = run("diff", tmp_path / "a", tmp_path / "b", columns=160)
    assert done.code == 1
    assert "+ new" in done.stdout
    assert "- gone" in done.stdout
    assert "4 -> 2x2" in done.stdout
    assert "F32 -> F16" in done.stdout


def test_a_tensor_that_is_tied_now_is_still_compared_under_its_name(run, tmp_path):
    x = torch.arange(4.0)
    with Store(tmp_path / "a") as a, Store(tmp_path / "b") as b:
        a.save(1, {"wte": x, "head": x.clone()})
        b.save(1, {"wte": x, "head": x})
    done = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    document = json.loads(done.stdout)
    assert (done.code, document["missing"], document["structure"]) == (1, [], True)
    assert all(one["equal"] for one in document["tensors"])


def test_states_that_differ_in_their_containers_alone_are_not_called_equal(run, tmp_path):
    x, y = torch.ones(4), torch.ones(4)
    with Store(tmp_path / "a") as a, Store(tmp_path / "b") as b:
        a.save(1, {"pair": [x, y]})
        b.save(1, {"pair": (x, y)})
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert done.code == 1
    assert "containers" in done.stdout


@pytest.mark.parametrize(
    ("a", "b", "different", "max_abs"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0, 0.0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]), 1, 1.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), 1, math.nan),
        (torch.tensor([2**40], dtype=torch.int64), torch.tensor([2**40 + 3], dtype=torch.int64), 1, 3.0),
        (torch.tensor([True, False]), torch.tensor([False, False]), 1, 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), 1, 2.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.5]).to(torch.float8_e4m3fn), 1, 0.5),
        (torch.zeros(0), torch.zeros(0), 0, 0.0),
        (torch.tensor(3.0), torch.tensor(5.0), 1, 2.0),
    ],
)
def test_equal_means_bits_and_differences_are_exact(a, b, different, max_abs):
    found = compare_tensors("x", a, b)
    assert found.equal == (different == 0)
    assert found.different == different
    assert found.max_abs == pytest.approx(max_abs, nan_ok=True)


def test_a_missing_side_is_not_found_and_a_broken_one_is_corrupt(run, store, payload, flip):
    assert run("diff", store, store.parent / "other").code == 3
    flip(payload(40))
    done = run("diff", f"{store}@10", store)
    assert done.code == 4
    assert done.stdout == ""
