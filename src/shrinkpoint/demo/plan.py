"""What to train, and when to kill it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shrinkpoint.errors import PolicyError


@dataclass(frozen=True)
class Plan:
    """One demo.

    Raises:
        PolicyError: too short for two checkpoints, one to fall back to and one to be killed in.

    Attributes:
        store: where the killed run saves; it stays for a look with the command line.
        steps, every: length of the run, and steps between two checkpoints.
        kill_at: kill in the first save of a step not before this step; None: a little past the middle.
        written: bytes of that save's payload that must stand in its file before the kill.
        keyframe_every: checkpoints between two keyframes.
        background: save in a thread of the training process, or in the loop.
        layers, width, context, batch, threads: of the model and its training.
    """

    store: Path = Path("runs/demo")
    steps: int = 200
    every: int = 10
    kill_at: int | None = None
    written: int = 1
    keyframe_every: int = 10
    background: bool = True
    layers: int = 6
    width: int = 256
    context: int = 128
    batch: int = 8
    threads: int = 2

    def __post_init__(self) -> None:
        if not 0 < 2 * self.every <= self.steps:
            found = f"{self.steps} steps with a checkpoint every {self.every}"
            raise PolicyError("demo", found=found, expected="room for two checkpoints", do="train for more steps")

    @property
    def record(self) -> Path:
        """A file beside the store, with what was measured; it also says that the store is a demo's and replaceable."""
        return self.store.with_name(self.store.name + ".json")

    @property
    def first_kill(self) -> int:
        return self.kill_at if self.kill_at is not None else self.steps * 6 // 10

    def arguments(self, store: Path, final: Path) -> list[str]:
        """The training's command line; the resumed process gets the very same as the killed one."""
        numbers = ("steps", "every", "keyframe_every", "layers", "width", "context", "batch", "threads")
        options = [text for name in numbers for text in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        background = "--background" if self.background else "--no-background"
        return ["--store", str(store), "--final", str(final), background, *options]
