"""docs/troubleshooting.md has a section for every class of errors and warnings, below that of its parent."""

from __future__ import annotations

import re
from pathlib import Path

from shrinkpoint import errors

TEXT = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
HEADINGS = re.findall(r"^(##+) (\w+(?:Error|Warning))$", TEXT, re.MULTILINE)
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.ShrinkpointError | Warning)
]


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
