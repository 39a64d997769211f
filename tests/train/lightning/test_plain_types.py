"""Values that Lightning saves, and that have no form of their own in a file, come back as they were."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_runs import QUIET, Small, every, points, small, trainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn

from shrinkpoint.errors import FormatError, MismatchError
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.train.lightning import ShrinkIO
from shrinkpoint.train.lightning.plain_types import from_plain, to_plain

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Color(Enum):
    RED = 1


class Word(str, Enum):
    A = "a"


class Counting(Callback):
    """Its state is told by its type, as Lightning had it before 1.5."""

    def __init__(self) -> None:
        self.batches: dict[Any, Any] = {"seen": 0}

    @property
    def state_key(self) -> type[Counting]:  # type: ignore[override]
        return type(self)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.batches["seen"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": dict(self.batches), "place": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["place"] == Path("x")
        self.batches = state["batches"]


LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.sampled_from([*Color, *Word]),
    st.builds(Path, st.just("a/b")),
    st.sampled_from([torch.float16, torch.int8]),
    st.just(torch.device("cuda", 1)),
    st.timedeltas(),
    st.complex_numbers(allow_nan=False),
    st.builds(range, st.integers(0, 9)),
    st.just(slice(1, None)),
    st.frozensets(st.integers(0, 9), max_size=3),
)
KEYS = st.one_of(
    st.text(max_size=3),
    st.integers(0, 3),
    st.sampled_from([Counting, EarlyStopping, *Word, Path("k"), (Color.RED, 1)]),
    st.sampled_from(["shrinkpoint:path", "shrinkpoint::set", "shrinkpoint:?", "shrinkpoint:dict"]),
)
TEXTS = KEYS.filter(lambda key: type(key) is str)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(TEXTS, inner, max_size=3).map(AttributeDict),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(lambda found: Namespace(**found)),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """With the types of containers, which == passes over."""
    if isinstance(value, dict):
        return type(value), [(key, typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return (type(value), typed(vars(value))) if isinstance(value, Namespace) else (type(value), value)


@given(NESTS)
def test_values_of_lightnings_kinds_come_back_as_they_were(value):
    flat = flatten({"it": to_plain(value)})
    restored = from_plain(unflatten(flat.tree, flat.tensors, where="test"))["it"]
    assert typed(restored) == typed(value)


def test_what_needs_no_form_is_the_same_object():
    module = nn.BatchNorm1d(2)
    whole = {"state_dict": module.state_dict(), "loops": [{"a": (1, 2)}]}
    assert to_plain(whole) is whole and from_plain(whole) is whole
    changed = to_plain(whole | {"path": Path("x")})
    assert changed["state_dict"] is whole["state_dict"] and changed["path"] == {"shrinkpoint:path": "x"}


def test_a_metadata_of_versions_survives_a_form_beside_it():
    restored_state = nn.BatchNorm1d(2).state_dict()
    restored_state["_extra_state"] = Path("x")
    assert (
        from_plain(to_plain(restored_state))._metadata == restored_state._metadata
        and from_plain(to_plain(restored_state)) == restored_state
    )


def test_enums_are_looked_up_and_nothing_is_imported():
    class Here(Enum):
        ONE = 1

    assert to_plain(Here.ONE) is Here.ONE  # nobody could find it again
    for place in (
        ["no.such", "A", "B"],
        ["os", "path", "join"],
        [__name__, "Color", "GREEN"],
        [Small.__module__, "Small", "x"],
    ):
        with pytest.raises(MismatchError, match="an enum that is imported"):
            from_plain({"shrinkpoint:enum": place})
    with pytest.raises(FormatError, match="the form 'spell'"):
        from_plain({"shrinkpoint:spell": 1})
    with pytest.raises(FormatError, match="load"):
        from_plain({"shrinkpoint:dtype": "load"})
    assert from_plain({"shrinkpoint:timedelta": [1, 2, 3]}) == timedelta(1, 2, 3)


@pytest.mark.parametrize("local", [False, True])
def test_a_callback_whose_state_key_is_its_type_is_saved_and_loaded(tmp_path, local):
    class Inner(Counting):
        """What no unpickling would find."""

    kind = Inner if local else Counting
    before, after = kind(), kind()
    trainer(tmp_path, ShrinkIO(), epochs=1, callbacks=[before, every(tmp_path)]).fit(small(), points())
    path = tmp_path / "epoch=0.ckpt"
    assert set(ShrinkIO().load_checkpoint(path)["callbacks"]) > {kind}
    trainer(tmp_path, ShrinkIO(), epochs=2, callbacks=[after]).fit(small(), points(), ckpt_path=path)
    assert before.batches == {"seen": 4} and after.batches == {"seen": 8}


def test_only_callbacks_are_looked_up_and_one_that_is_gone_is_said_by_its_name(tmp_path):
    restored = from_plain({"shrinkpoint:dict": [[{"shrinkpoint:callback": ["gone.module", "Lost"]}, {"n": 1}]]})
    assert restored == {"gone.module.Lost": {"n": 1}}
    assert from_plain({"shrinkpoint:callback": ["subprocess", "Popen"]}) == "subprocess.Popen"
    assert to_plain(Small) is Small  # a state refuses it
    trainer(tmp_path, ShrinkIO(), epochs=1, callbacks=[Counting(), every(tmp_path)]).fit(small(), points())
    resumed = trainer(tmp_path, ShrinkIO(), epochs=2)
    with pytest.warns(UserWarning, match=r"add the following callbacks: .*Counting"):
        resumed.fit(small(), points(), ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize(
    "form",
    [
        {"enum": ["a", "b"]},
        {"enum": 3},
        {"callback": [1, 2]},
        {"callback": None},
        {"dict": 1},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"ordered": [[{}, 1]]},
        {"timedelta": [10**30]},
        {"namespace": [1]},
        {"device": "nowhere:x"},
        {"range": [0, 1, 0]},
        {"complex": ["a", "b"]},
        {"set": [[]]},
        {"path": 1},
        {"attributes": 7},
        {"dtype": 5},
        {"slice": []},
    ],
)
def test_a_forged_form_is_an_error_of_ours(form):
    ((name, body),) = form.items()
    with pytest.raises(FormatError):
        from_plain({f"shrinkpoint:{name}": body})


@pytest.mark.parametrize("background", [False, True])
def test_hyperparameters_of_omegaconf_come_back_as_plain_values(tmp_path: Path, background: bool) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1, "again": "${lr}", "sizes": [1, {"path": Path("a")}], "none": None})
    model = Small(width=8, config=config)
    trainer(tmp_path, ShrinkIO(background=background), epochs=1, callbacks=[every(tmp_path)]).fit(model, points(1))
    [path] = tmp_path.glob("*.ckpt")
    saved = ShrinkIO().load_checkpoint(path)["hyper_parameters"]["config"]
    assert saved == {"lr": 0.1, "again": "${lr}", "sizes": [1, {"path": Path("a")}], "none": None}
    assert type(saved) is dict and type(saved["sizes"]) is list
