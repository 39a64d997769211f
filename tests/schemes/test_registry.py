"""One spelling of a scheme with its settings: read by one function, printed by `repr`."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes import get_scheme, scheme_factory

CONFIG = {"bins": 8, "embedding_bins": 16, "prune": 0.5, "protect": 0.005}
TEXTS = (
    "lossless",
    "lossless(chunk=4096)",
    "fisher(terms=64)",
    "fisher(nats=0.01)",
    "fisher(ratio=40)",
    "fisher(relative_error=.3)",
    'fisher(relative_error="30%", moments="exact", seed=7, terms=16)',
    f"inshrinkerator(config={CONFIG})",
    f'inshrinkerator(threshold="1%", config={CONFIG}, paper=True, optimizer="lossy")',
    "inshrinkerator(config={'bins': 8, 'embedding_bins': 16, 'prune': .5, 'protect': .005, 'metric': 'sensitivity'})",
    'qd(config={"least": 8, "most": 32}, higher_is_better=True)',
    'cnr(config={"bins": 16, "steps": 25, "range": .2}, coarser=True)',
    'gobo(config={"bins": 16, "embedding_bins": 32})',
    "lc-checkpoint",
    "lc-checkpoint(bits=2, paper=True)",
    'lc-checkpoint(scope="model", representative="middle", optimizer="reset")',
    "scar",
    'scar(fraction="12.5%", order="random", seed=3)',
    'topn(fraction=1e-3, optimizer="lossy")',
    "excp",
    'excp(alpha=1e-4, beta=0, bits=2, rule="released", paper=True, paper_fp16=True, seed=1)',
)


def settings_of(scheme: Any) -> dict[str, Any]:
    return dict(scheme.arguments)


def test_what_repr_prints_is_read_as_an_equal_scheme():
    for text in TEXTS:
        scheme = get_scheme(text)
        again = get_scheme(repr(scheme))
        assert type(again) is type(scheme) and settings_of(again) == settings_of(scheme) and repr(again) == repr(scheme)
        assert again.coders == scheme.coders and scheme.id == again.id == repr(scheme).partition("(")[0]


@pytest.mark.parametrize(
    "kind",
    [
        sp.Lossless,
        sp.Fisher,
        sp.Inshrinkerator,
        sp.QD,
        sp.CNR,
        sp.GOBO,
        sp.LCCheckpoint,
        sp.SCAR,
        sp.TOPN,
        sp.ExCP,
    ],
)
def test_every_setting_is_explicit_and_in_the_spelling(kind):
    """But for one that changes nothing that is written, and for the three ways to say what is lost, of which one is."""
    parameters = inspect.signature(kind).parameters
    assert all(one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters.values())
    scheme = kind(config=CONFIGS[kind.id]) if kind.id in CONFIGS else kind(**CHANGED.get(kind.id, {}))
    missing = parameters.keys() - settings_of(scheme).keys()
    assert missing <= {"progress", "budget", "ratio", "relative_error"}


CONFIGS: dict[str, dict[str, Any]] = {
    "inshrinkerator": CONFIG,
    "qd": {"least": 8, "most": 32},
    "cnr": {"bins": 16, "steps": 25, "range": 0.2},
    "gobo": {"bins": 16, "embedding_bins": 32},
}
CHANGED: dict[str, dict[str, Any]] = {"scar": {"order": "random"}}


def test_what_has_no_plain_value_is_shown_as_what_it_is():
    def loss(state: Any) -> float:
        return 0.0

    assert repr(sp.Fisher(budget="1%", evaluate=loss)) == 'fisher(budget="1%", evaluate=<loss>)'
    text = repr(sp.Inshrinkerator(evaluate=loss, group=object(), fallback="lossless"))
    assert text.startswith("inshrinkerator(evaluate=<loss>, ") and "group=<object>" in text and "0x" not in text
    with pytest.raises(PolicyError, match="plain values"):
        get_scheme(text)


def test_percentages_and_numbers_mean_the_same_in_all_schemes():
    def loss(state: Any) -> float:
        return 0.0

    for kind in (sp.Inshrinkerator, sp.QD, sp.CNR, sp.GOBO):
        assert repr(kind(threshold="1%", evaluate=loss)) == repr(kind(threshold=0.01, evaluate=loss))
    for kind in (sp.SCAR, sp.TOPN):
        assert repr(kind(fraction="2.5 %")) == repr(kind(fraction=0.025))
    assert repr(sp.Fisher(relative_error="30%")) == repr(sp.Fisher(relative_error=0.3))
    assert sp.Fisher(budget="1%", evaluate=loss).arguments["budget"] == "1%"


def test_more_than_all_is_no_share():
    for make in (lambda x: sp.QD(threshold=x, evaluate=len), lambda x: sp.TOPN(fraction=x)):
        make("100%"), make(1)
        for amount in ("101%", 1.01):
            with pytest.raises(PolicyError, match=r'at most 1 or "100%"'):
                make(amount)
    with pytest.raises(PolicyError, match=r"budget: .101%.; .*at most"):
        sp.Fisher(budget="101%", evaluate=len)
    with pytest.raises(PolicyError, match=r'relative_error: 3; .*at most 2 or "200%"'):
        sp.Fisher(relative_error=3)


def test_a_number_of_per_cent_is_answered_with_how_to_write_it():
    with pytest.raises(PolicyError, match=r'threshold: 5; .*Pass "5%" or 0.05'):
        sp.Inshrinkerator(threshold=5, evaluate=len)


def test_a_bare_number_as_a_budget_is_refused_and_its_unit_named():
    with pytest.raises(PolicyError, match=r'budget: 0.001; .*"1%".*nats='):
        sp.Fisher(budget=0.001, evaluate=len)


def test_a_text_that_is_no_scheme_is_refused_and_nothing_of_it_is_run():
    for text, message in [
        ("zip", "'lossless', .*'fisher'"),
        ("Fisher", "a name"),
        ("fisher(.3)", "plain values"),
        ("fisher(error=.3)", r"error= in .*relative_error"),
        ("fisher(evaluate=len)", "plain values"),
        ("fisher(evaluate='loss')", "no plain value"),
        ("fisher(relative_error=__import__('os').getpid())", "plain values"),
        ("fisher(relative_error=.3)(seed=1)", "plain values"),
        ("fisher(relative_error=.3) + f(seed=1)", "plain values"),
        ("fisher(relative_error=.3) + 1", "a name"),
        ("fisher(relative_error=.3, relative_error=.2)", "plain values"),
        ("fisher(**{'relative_error': .3})", "plain values"),
        ("fisher(ratio=" + "-" * 3000 + "40)", "plain values"),
        ("fisher(ratio=" + "(" * 1500 + "40" + ")" * 1500 + ")", "plain values"),
        ("fisher(ratio=" + "1" * 5000 + ")", "a name"),
        ("fisher(ratio=" + "1" * 4000 + ")", "ratio"),
        ("fisher(relative_error=3)", "relative_error"),
        ("", "a name"),
    ]:
        with pytest.raises(PolicyError, match=message):
            get_scheme(text)


@given(st.text(alphabet="fisher(),=.3\"'%{}[]*#\\\n 1e-", max_size=60))
def test_any_text_is_a_scheme_or_an_error_of_ours(inside):
    with suppress(PolicyError):
        get_scheme(f"fisher({inside})")


def test_a_scheme_with_settings_is_named_wherever_a_scheme_is_taken(tmp_path):
    text = "fisher(relative_error=.3)"
    with sp.CheckpointManager(tmp_path / "run", scheme=text) as manager:
        assert manager.save(1, extra={"a": 1}) is not None
    assert sp.save({"a": 1}, tmp_path / "a", scheme=text).scheme == "fisher"
    assert sp.Store(tmp_path / "store").save(1, {"a": 1}, scheme=text).scheme == "fisher"


def test_what_has_no_plain_value_is_passed_beside_the_text():
    scheme = scheme_factory('inshrinkerator(threshold="1%")')(evaluate=len)
    assert repr(scheme) == "inshrinkerator(threshold=0.01, evaluate=<len>)"


def test_a_subclass_with_a_constructor_of_its_own_has_a_spelling():
    class Mine(sp.Lossless):
        def __init__(self) -> None:
            super().__init__(chunk=4096)

    assert repr(Mine()) == "lossless"


def test_a_trainers_settings_take_the_same_text_and_measure_with_it():
    pytest.importorskip("transformers")
    from shrinkpoint.train.transformers import ShrinkConfig

    shrink = ShrinkConfig(scheme='inshrinkerator(threshold="1%")', evaluate="eval_loss")
    scheme = shrink.make_checkpointer(len, False, None).scheme
    assert repr(scheme) == "inshrinkerator(threshold=0.01, evaluate=<len>)"
    assert repr(ShrinkConfig(scheme="fisher(relative_error=.3)").make_checkpointer(None, False, None).scheme) == repr(
        sp.Fisher(relative_error=0.3)
    )
