"""`diff` compares bit for bit, and measures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.strategies import same

from shrinkpoint.store import Store
from shrinkpoint.store.decode import ChainLeaves
from shrinkpoint.store.load import find_chain
from shrinkpoint.tensors.compare import compare_states, compare_tensors
from shrinkpoint.tensors.names import named_leaves


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


def changed(values: dict[str, float]) -> dict[str, torch.Tensor]:
    """A state of which each tensor is ones, and some values of it another number."""
    state = {name: torch.ones(100) for name in (*values, "same")}
    for index, (name, value) in enumerate(values.items(), 1):
        state[name][:index] = value
    return state


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    values = {"little": 1.001, "most": 50.0, "middle": 2.0, "nan": math.nan}
    with Store(tmp_path / "a") as a, Store(tmp_path / "b") as b:
        a.save(1, changed(dict.fromkeys(values, 1.0)) | {"cast": torch.ones(3), "gone": torch.ones(3)})
        b.save(1, changed(values) | {"cast": torch.ones(3).half(), "new": torch.ones(3)})
    return tmp_path / "a", tmp_path / "b"


def ranked(run, pair, *options: object) -> list[str]:
    document = json.loads(run("diff", *pair, "--json", *options).stdout)
    return [row["name"] for row in document["tensors"]]


def test_the_largest_relative_change_comes_first(run, pair):
    assert ranked(run, pair) == ["cast", "nan", "most", "middle", "little", "same"]
    assert ranked(run, pair, "--limit", 3) == ["cast", "nan", "most"]


def test_the_order_is_a_choice(run, pair):
    assert ranked(run, pair, "--sort", "share") == ["cast", "nan", "middle", "most", "little", "same"]
    assert ranked(run, pair, "--sort", "max") == ["cast", "nan", "most", "middle", "little", "same"]
    assert ranked(run, pair, "--sort", "name") == ["little", "most", "middle", "nan", "same", "cast"]


def test_what_only_one_has_is_above_the_table_and_what_a_limit_hides_is_said(run, pair):
    lines = [line.strip() for line in run("diff", *pair, "--limit", 2, columns=160).stdout.splitlines()]
    order = [next(i for i, line in enumerate(lines) if line.startswith(x)) for x in ("+ new", "- gone", "cast", "nan")]
    assert order == sorted(order) and "and 3 tensors that changed less" in lines
    assert not any(line.startswith("middle") for line in lines)


def test_a_share_is_of_all_values(run, pair):
    rows = {row["name"]: row for row in json.loads(run("diff", *pair, "--json").stdout)["tensors"]}
    assert [rows[name]["share"] for name in ("little", "most", "cast", "same")] == [0.01, 0.02, None, 0.0]


class Watched:
    """The leaves of a checkpoint, and which were read together."""

    def __init__(self, leaves: ChainLeaves) -> None:
        self._inner, self.leaves, self.tree, self.groups = leaves, leaves.leaves, leaves.tree, []

    def read(self, names):
        self.groups.append([*names])
        return self._inner.read(names)


def test_a_few_tensors_are_read_at_a_time_and_the_answer_is_that_of_all_at_once(store):
    def sides() -> tuple[Watched, Watched]:
        return tuple(Watched(ChainLeaves(find_chain(store, step))) for step in (20, 40))

    whole, few = sides(), sides()
    expected, found = compare_states(*whole), compare_states(*few, group_bytes=1)
    assert found == expected and not found.equal
    sizes = [sum(few[0].leaves[name].nbytes > 0 for name in group) for group in few[0].groups]
    assert max(sizes) == 1 and len(sizes) > 5 and len(whole[0].groups) == 1


def test_leaves_are_those_of_the_loaded_state(store):
    loaded = named_leaves(Store(store).load(20))
    leaves = ChainLeaves(find_chain(store, 20))
    assert [*leaves.leaves] == [*loaded]
    values = leaves.read([*loaded])
    assert same(values, loaded)


@pytest.mark.parametrize("form", ["torch", "safetensors", "folder"])
def test_what_others_wrote_is_compared_too(run, tmp_path, form):
    from safetensors.torch import save_file

    states = [{"a": torch.arange(5.0), "b": torch.ones(3)}, {"a": torch.arange(5.0), "b": torch.zeros(3)}]
    paths = [tmp_path / f"one-{i}" for i in range(2)]
    for i, state in enumerate(states):
        if form == "torch":
            paths[i] = tmp_path / f"{i}.pt"
            torch.save(state, paths[i])
        elif form == "safetensors":
            save_file(state, tmp_path / f"{i}.safetensors")
            paths[i] = tmp_path / f"{i}.safetensors"
        else:
            (tmp_path / f"{i}").mkdir()
            save_file(state, tmp_path / f"{i}" / "model.safetensors")
            (tmp_path / f"{i}" / "config.json").write_text("{}")
            paths[i] = tmp_path / f"{i}"
    document = json.loads(run("diff", *paths, "--json").stdout)
    rows = {row["name"].rpartition("/")[2]: row for row in document["tensors"]}
    assert rows["a"]["equal"] and rows["b"]["relative"] == 1.0 and not document["values"]
    assert run("convert", paths[0], tmp_path / "ours").code == 0
    done = run("diff", paths[0], tmp_path / "ours", "--json")
    assert done.code == 0 and json.loads(done.stdout)["equal"]


def test_equal_means_bits_and_differences_are_exact():
    for a, b, different, max_abs in [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0, 0.0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]), 1, 1.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), 1, math.nan),
        (torch.tensor([2**40], dtype=torch.int64), torch.tensor([2**40 + 3], dtype=torch.int64), 1, 3.0),
        (torch.tensor([True, False]), torch.tensor([False, False]), 1, 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), 1, 2.0),
        (
            torch.tensor([1 + 1j, 2j], dtype=torch.complex128),
            torch.tensor([1 + 1j, 5j], dtype=torch.complex128),
            1,
            3.0,
        ),
        (torch.tensor([-math.inf, math.inf]), torch.tensor([math.inf, math.inf]), 1, math.inf),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.5]).to(torch.float8_e4m3fn), 1, 0.5),
        (torch.zeros(0), torch.zeros(0), 0, 0.0),
        (torch.tensor(3.0), torch.tensor(5.0), 1, 2.0),
    ]:
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
