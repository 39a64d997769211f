"""Where nothing is known of the loss, errors of each kind of weights tell what it minds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, global_weights, normal
from helpers.small_training import Silent
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.schemes.fisher.probe import (
    MAX_GROUPS,
    MIN_CURVATURE_RATIO,
    curvatures_from_probe,
    group_by_pattern,
    probe,
)
from shrinkpoint.storage import MemoryStorage

SENSITIVE = {"blocks.0.up.weight": 1.0, "blocks.1.up.weight": 1.0, "blocks.0.down.weight": 100.0, "head.weight": 2500.0}
WEIGHTS = {name: normal(64, 48, seed=i, scale=0.1) for i, name in enumerate(SENSITIVE)}


def loss(model: dict[str, Tensor]) -> float:
    return 3.0 + sum(SENSITIVE[name] * float((model[name] - WEIGHTS[name]).square().sum()) / 2000 for name in SENSITIVE)


def rise(values: dict[str, Tensor]) -> float:
    return loss({**WEIGHTS, **values}) - 3.0


def test_layers_of_one_kind_are_tried_together() -> None:
    kinds = group_by_pattern({**WEIGHTS, "a.bias": torch.zeros(4), "b.bias": torch.zeros(4)})
    assert kinds["blocks.0.up.weight"] == kinds["blocks.1.up.weight"] != kinds["blocks.0.down.weight"]
    assert kinds["a.bias"] == kinds["b.bias"] == "vectors"


def test_the_number_of_evaluations_is_bounded() -> None:
    names = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}.weight" for i in range(60)]
    kinds = group_by_pattern({name: torch.zeros(2 + i, 2) for i, name in enumerate(names)})
    assert len(set(kinds.values())) == MAX_GROUPS
    assert kinds[names[-1]] == names[-1] and kinds[names[0]] == "others"


def test_probes_find_the_curvature_of_every_kind() -> None:
    found = probe(global_weights(WEIGHTS), rise)
    for name, kind in group_by_pattern(WEIGHTS).items():
        assert found[kind] == pytest.approx(max(SENSITIVE[name], MIN_CURVATURE_RATIO * 2500) / 1000, rel=1e-3)
        assert curvatures_from_probe(global_weights(WEIGHTS), found)[name].mean == pytest.approx(found[kind], rel=1e-6)


def test_a_loss_that_minds_nothing_tells_nothing() -> None:
    assert probe(global_weights(WEIGHTS), lambda values: 0.0) == {}


def test_a_kind_that_breaks_the_model_counts_as_the_most_sensitive() -> None:
    found = probe(global_weights(WEIGHTS), lambda values: math.nan if "head.weight" in values else rise(values))
    assert found["head.weight"] == max(found.values()) == found["blocks.*.down.weight"]


def _saved(how: sp.Fisher) -> tuple[float, float]:
    store = sp.Store(MemoryStorage())
    report = store.save(1, {"model": WEIGHTS}, scheme=how)
    return report.stored_bytes, loss(store.load(1)["model"]) - 3.0


def test_what_was_probed_costs_less_at_the_same_loss() -> None:
    size, risen = _saved(sp.Fisher(relative_error=0.3, evaluate=lambda state: loss(state["model"])))
    larger, more = _saved(sp.Fisher(relative_error=0.2))
    assert size < larger and risen < more


def test_a_run_is_probed_once_and_a_restored_one_not_again() -> None:
    asked: list[Any] = []

    def evaluate(state: Any) -> float:
        asked.append(1)
        return loss(state["model"])

    store, how = sp.Store(MemoryStorage()), sp.Fisher(nats=0.01, evaluate=evaluate)
    store.save(1, {"model": WEIGHTS}, scheme=how)
    first = len(asked)
    store.save(2, {"model": {name: x + 0.001 for name, x in WEIGHTS.items()}}, scheme=how)
    again = sp.Fisher(nats=0.01, evaluate=evaluate)
    again.resume(store.manifest(2).loss, 1)
    before = len(asked)
    with Silent():  # so little movement is less than the dither
        store.save(3, {"model": WEIGHTS}, scheme=again)
    assert before - first < first and len(asked) - before < first
    assert store.manifest(3).loss["probed"] == store.manifest(1).loss["probed"]
    assert store.manifest(1).loss["probed"]


def test_what_the_optimizer_knows_is_not_asked_for() -> None:
    asked: list[Any] = []
    moment = {name: torch.full_like(x, 1e-6) for name, x in WEIGHTS.items()}

    def evaluate(state: Any) -> float:
        asked.append(1)
        return loss(state["model"])

    how = sp.Fisher(relative_error=0.3, evaluate=evaluate)
    sp.Store(MemoryStorage()).save(1, adam(WEIGHTS, moment, moment), scheme=how)
    assert len(asked) == 6  # the state itself, twice, other weights, two entries, and what is written
