"""`shrinkpoint export`: a checkpoint in a form that needs no shrinkpoint to read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, note, say, waiting
from shrinkpoint.cli.target import JsonOption, PlaceArgument, StepOption, target
from shrinkpoint.errors import PolicyError


class Form(str, Enum):
    """What to write."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_SUFFIXES = {".safetensors": Form.SAFETENSORS, ".pt": Form.TORCH, ".pth": Form.TORCH, ".bin": Form.TORCH}


def command(
    place: PlaceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    step: StepOption = None,
    to: Annotated[
        Form | None, typer.Option("--to", help="The format; if not given, OUT's suffix says it.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="GLOB", help='Only these, e.g. "model/*"; may be given again.', show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as plain safetensors or as a torch file.

    safetensors: every tensor under its name, and no plain values. torch: the whole state, nested as it was saved;
    torch.load(OUT, weights_only=True) opens it.
    """
    where, form = target(place, step), to or _form(out)
    if out.exists() and not force:
        raise PolicyError(str(out), found="a file that exists", expected="a new name", do="add --force to replace it")
    from shrinkpoint.cli.exported import write

    with waiting(f"writing {out}"):
        done = write(where, out, torch_file=form is Form.TORCH, only=only or [])
    if json:
        document = {"from": str(where), "out": str(out), "to": form.value, "tensors": done.tensors, "bytes": done.bytes}
        emit({**document, "left_out": done.left_out, "converted": done.converted})
        return
    size = f"{words.count(done.tensors, 'tensor')}, {words.size(done.bytes)}"
    say(f"{out}: {size}, {form.value}, from {where}")
    if done.left_out:
        note(
            f"{words.count(done.left_out, 'plain value')} left out: safetensors holds tensors only (--to torch has all)"
        )
    if done.converted:
        note(
            f"{words.count(done.converted, 'numpy value')} became tensors and numbers, which weights_only=True can open"
        )


def _form(out: Path) -> Form:
    if out.suffix not in _SUFFIXES:
        expected = ", ".join(_SUFFIXES)
        raise PolicyError(
            str(out), found=f"the suffix {out.suffix!r}", expected=expected, do="say --to torch or safetensors"
        )
    return _SUFFIXES[out.suffix]
