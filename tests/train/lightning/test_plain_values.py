"""Values that Lightning saves, and that have no form of their own in a file, come back as they were."""

from __future__ import annotations

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
from lightning.pytorch.utilities import AttributeDict as PrintedDict
from torch import nn

from shrinkpoint.errors import StateError
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback, load_from_checkpoint

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Word(str, Enum):
    A = "a"


class Configured(Small):
    """With one hyperparameter, or with a container of all."""

    def __init__(self, config: Any, alone: bool = False) -> None:
        super().__init__()
        self.config = config
        if alone:
            self.save_hyperparameters(config)


class Keeping(Callback):
    """Keeps what no file can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": nn.Linear(2, 2)}


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


KEYS = st.one_of(st.text(max_size=3), st.sampled_from([Counting, EarlyStopping, *Word, (Counting, 1)]))
NESTS = st.recursive(
    st.sampled_from([Path("a"), Word.A, 3, torch.int8]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(AttributeDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(PrintedDict),
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """With the types of containers, which == passes over."""
    if isinstance(value, dict):
        return type(value), [(key, typed(item)) for key, item in value.items()]
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), value)


@given(NESTS)
def test_dicts_and_callbacks_of_lightning_come_back_as_they_were(value):
    flat = flatten({"it": value})
    assert typed(unflatten(flat.tree, flat.tensors, where="test")["it"]) == typed(value)


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
    restored = unflatten({"$d": [[{"$x": ["callback", ["gone.module", "Lost"]]}, 1]]}, {})
    assert restored == {"gone.module.Lost": 1}
    with pytest.raises(StateError, match="type"):
        flatten({"a": Small})
    trainer(tmp_path, ShrinkIO(), epochs=1, callbacks=[Counting(), every(tmp_path)]).fit(small(), points())
    resumed = trainer(tmp_path, ShrinkIO(), epochs=2)
    with pytest.warns(UserWarning, match=r"add the following callbacks: .*Counting"):
        resumed.fit(small(), points(), ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_hyperparameters_of_omegaconf_come_back_as_plain_values(tmp_path: Path, background: bool, alone: bool) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    plain = {"lr": 0.1, "again": "${lr}", "sizes": [1, {"path": Path("a")}], "none": None}
    model = Configured(omegaconf.OmegaConf.create(plain), alone)
    trainer(tmp_path, ShrinkIO(background=background), epochs=1, callbacks=[every(tmp_path)]).fit(model, points(1))
    [path] = tmp_path.glob("*.ckpt")
    checkpoint = ShrinkIO().load_checkpoint(path)
    saved = checkpoint["hyper_parameters"] if alone else checkpoint["hyper_parameters"]["config"]
    assert saved == plain and type(saved) is dict and type(saved["sizes"]) is list
    restored = load_from_checkpoint(Configured, path)
    assert restored.config["again"] == (0.1 if alone else "${lr}")


def test_what_is_refused_is_refused_when_training_starts(tmp_path: Path) -> None:
    for model, callbacks, name in (
        (Configured({"net": nn.Linear(2, 2)}), [], "hyper_parameters"),
        (small(), [Keeping()], "callbacks"),
    ):
        kept = [*callbacks, every(tmp_path), ShrinkIOCallback()]
        running = trainer(tmp_path, ShrinkIO(), epochs=1, callbacks=kept)
        with pytest.raises(StateError, match=name):
            running.fit(model, points(1))
        assert running.global_step == 0
