"""What an interrupted process may leave goes with the next save; what a stranger left stays."""

from __future__ import annotations

from pathlib import Path

import torch

from shrinkpoint.store import Store


def test_empty_directories_of_a_dead_save_are_swept_and_those_of_a_stranger_stay(tmp_path: Path) -> None:
    for name in ("step-000000005/bases", "step-000000007", "step-x", "notes/step-000000005"):
        (tmp_path / name).mkdir(parents=True)
    with Store(tmp_path) as store:
        store.save(9, {"w": torch.ones(3)})
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_dir())
    assert left == ["notes", "notes/step-000000005", "step-000000009", "step-x"]
