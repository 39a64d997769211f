"""What an installed shrinkpoint must be able to do: a save, a delta, a load, a store, and the command line.

Run by the Python of an environment that has torch and shrinkpoint[cli] and nothing else; prints "fine" at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

import shrinkpoint as sp
from shrinkpoint.errors import UnmeasuredLossWarning


def main() -> None:
    """Go through it all in a temporary directory."""
    package = Path(sp.__file__).parent
    assert package.is_relative_to(sysconfig.get_path("platlib")), f"{package} is not the installed one"
    assert (package / "py.typed").exists() and sp.__version__ == version("shrinkpoint")
    warnings.simplefilter("ignore", UnmeasuredLossWarning)  # nothing is evaluated here
    with tempfile.TemporaryDirectory() as where:
        files(Path(where))
        stores(Path(where, "run"))
    print("fine")


def files(where: Path) -> None:
    """A file, a delta on it, and both loaded."""
    state = {"w": torch.randn(300, 400), "b": torch.randn(400).bfloat16(), "step": 1}
    later = {"w": state["w"] * 1.001, "b": state["b"], "step": 2}
    sp.save(state, where / "a.safetensors")
    sp.save(later, where / "b.safetensors", base=where / "a.safetensors")
    assert torch.equal(sp.load(where / "a.safetensors")["w"], state["w"])
    loaded = sp.load(where / "b.safetensors")
    assert torch.equal(loaded["w"], later["w"]) and torch.equal(loaded["b"], later["b"]) and loaded["step"] == 2


def stores(where: Path) -> None:
    """A run of a model and AdamW, restored, listed and verified; the lossy scheme too."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sp.CheckpointManager(where) as manager:
        for step in (1, 2, 3):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            model[0].weight.zero_()
        assert manager.restore(model=model, optimizer=optimizer).step == 3
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    lossy = where.with_name("lossy")
    with sp.CheckpointManager(lossy, scheme=sp.Fisher(relative_error=0.3)) as manager:
        assert manager.save(1, model=model, optimizer=optimizer).ratio > 4
    assert [entry["step"] for entry in json.loads(cli("list", str(where), "--json"))["checkpoints"]] == [1, 2, 3]
    assert json.loads(cli("verify", "--deep", str(where), "--json"))["findings"] == []
    assert "fisher" in cli("list", str(lossy))


def cli(*args: str) -> str:
    """What the command prints on stdout."""
    command = [str(Path(sys.executable).with_name("shrinkpoint")), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
