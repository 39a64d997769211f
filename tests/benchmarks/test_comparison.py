"""Promise: every program that is compared gives back what it was given, and the table says what each costs."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.comparison import run as comparison

pytestmark = pytest.mark.filterwarnings("ignore")  # of states this small schemes and torch say much


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Of a toy run, which is trained."""
    sizes = {"first": 4, "interval": 2, "checkpoints": 3, "threads": 1, "seed": 0, "round": 0, "quick": True}
    settings = Namespace(folder=tmp_path_factory.mktemp("run"), data=Path("nowhere"), **sizes)
    comparison.make_series(settings)
    return settings


@pytest.mark.parametrize(
    "name", ["torch.save", "torch DCP", "safetensors", "ExCP, as released", "shrinkpoint, lossless"]
)
def test_a_method_saves_and_loads_a_run(name: str, options: Namespace) -> None:
    points = list(comparison.Run(Namespace(**vars(options), method=name)).measure())
    assert [point["step"] for point in points] == [4, 6, 8]
    assert all(point["bytes"] > 0 and point["save"] >= point["flush"] >= 0 < point["load"] for point in points)
    is_lossy = comparison.METHODS[name].lossy
    assert {point["exact"] for point in points} == {not is_lossy}
    assert all(("rise" in point) == is_lossy for point in points)
    assert [path.name for path in options.folder.iterdir()] == ["series"]
    json.dumps(points)


def test_the_table_has_bytes_beside_torch_save_and_medians() -> None:
    def row(method: str, size: int, save: float, number: int = 0, **more: object) -> dict[str, object]:
        point = {"bytes": size, "save": save, "evaluate": 0.0, "load": save, "exact": not more, **more}
        return {
            "method": method,
            "version": "1",
            "round": number,
            "checkpoints": [{"step": step, **point} for step in (1, 2)],
        }

    rows = [row("torch.save", 10**6, seconds, number) for number, seconds in enumerate((0.1, 0.5, 0.2))]
    rows += [row("moonclip", 5 * 10**5, 0.3), row("ExCP, as released", 10**5, 0.4, rise=0.01)]
    rows.append({"method": "Orbax", "version": "1", "round": 0, "error": "it fails"})
    summary = comparison.summarize(rows)
    assert [(found["bytes"], found["save"]) for found in summary] == [(2 * 10**6, 0.2), (10**6, 0.3), (2 * 10**5, 0.4)]
    lines = comparison.report(summary).splitlines()
    assert "2.00x" in lines[3] and "yes" in lines[3]
    assert "10.00x" in lines[4] and "+1.00% +1.00%" in lines[4] and "no" in lines[4]
