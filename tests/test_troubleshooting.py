"""The pages on errors and warnings have a section for every class, below that of its parent, and real messages."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint import errors

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "troubleshooting.md").read_text() + (DOCS / "warnings.md").read_text()
HEADINGS = re.findall(r"^(##+) (\w+(?:Error|Warning))$", TEXT, re.MULTILINE)
MESSAGES = dict(re.findall(r"(?ms)^```\n(\w+)(: .*?)^```$", TEXT))
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.ShrinkpointError | Warning)
]


class Config:
    """A class of a program; its module is that of the page."""

    __module__ = "__main__"


def run_of_three_steps(model: torch.nn.Module) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    with sp.CheckpointManager("runs/gpt") as manager:
        for step in (1, 2, 3):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer, rng=False)
    return Path("runs/gpt/step-000000003/rank-00000.safetensors")


def load_without_base() -> None:
    sp.save({"weight": torch.randn(100, 100)}, "monday.safetensors")
    sp.save({"weight": torch.randn(100, 100)}, "tuesday.safetensors", base="monday.safetensors")
    Path("monday.safetensors").rename("old.safetensors")
    sp.load("tuesday.safetensors")


def load_foreign(model: torch.nn.Module) -> None:
    torch.save(model.state_dict(), "model.pt")
    sp.load("model.pt")


def load_damaged(payload: Path) -> None:
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    sp.load("runs/gpt", step=3)


def restore_wider() -> None:
    sp.CheckpointManager("runs/gpt").restore(step=2, model=torch.nn.Linear(64, 128))


ERRORS: dict[str, Callable[[torch.nn.Module, Path], Any]] = {
    "FormatError": lambda model, payload: load_foreign(model),
    "CorruptError": lambda model, payload: load_damaged(payload),
    "ChainError": lambda model, payload: load_without_base(),
    "NotFoundError": lambda model, payload: sp.load("runs/gpt", step=7),
    "StateError": lambda model, payload: sp.save({"model": {}, "config": Config()}, "a.safetensors"),
    "MismatchError": lambda model, payload: restore_wider(),
}
WARNINGS = {
    "LossWarning": lambda: sp.Fisher(budget="1%", evaluate=lambda state: 1.0),
    "UnmeasuredLossWarning": lambda: "fisher(relative_error=.3)",
}


def test_every_message_of_the_pages_is_made_here():
    assert MESSAGES.keys() == {*ERRORS, *WARNINGS}


@pytest.mark.parametrize("name", ERRORS)
def test_messages_of_errors_are_real(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    payload = run_of_three_steps(model)
    with pytest.raises(errors.ShrinkpointError) as raised:
        ERRORS[name](model, payload)
    assert_stated(raised.type.__name__, str(raised.value).replace(f"{tmp_path}/", ""), name)


@pytest.mark.parametrize("name", WARNINGS)
def test_messages_of_warnings_are_real(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sp.save({"model": torch.nn.Linear(64, 64).state_dict()}, "lossy.safetensors", scheme=WARNINGS[name]())
    assert_stated(caught[0].category.__name__, str(caught[0].message), name)


def assert_stated(found_name: str, found: str, name: str) -> None:
    assert found_name == name
    stated = MESSAGES[name].removeprefix(": ")
    assert OutputChecker().check_output(stated, f"{found}\n", ELLIPSIS | NORMALIZE_WHITESPACE), found


def test_every_class_has_its_section_and_no_other_has_one():
    names = [name for _, name in HEADINGS]
    assert sorted(names) == sorted([*(cls.__name__ for cls in CLASSES), "UserWarning"])


def test_every_section_says_what_to_do():
    sections = {
        cls: re.search(rf"^##+ {cls.__name__}$(.*?)(?=^##+ |\Z)", TEXT, re.MULTILINE | re.DOTALL) for cls in CLASSES
    }
    silent = [cls for cls, text in sections.items() if text is None or not re.search(r"\*\*Do\*\*|\| do \|", text[1])]
    assert silent == [errors.ShrinkpointError]  # which has its subclasses


def test_the_subclass_of_a_class_comes_below_it():
    order = {name: (index, len(marks)) for index, (marks, name) in enumerate(HEADINGS)}
    for cls in CLASSES:
        parent = order.get(cls.__base__.__name__, (0, 0)) if cls.__base__ is not errors.ShrinkpointError else (0, 0)
        if parent != (0, 0) and issubclass(cls, errors.ShrinkpointError):
            assert order[cls.__name__][0] > parent[0] and order[cls.__name__][1] > parent[1], cls
