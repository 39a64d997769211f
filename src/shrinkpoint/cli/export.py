"""`shrinkpoint export`: a checkpoint in a form that needs no shrinkpoint to read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import humanize
from shrinkpoint.cli.arguments import JsonOption, LocationArgument, StepOption, parse_location
from shrinkpoint.cli.console import print_json, print_line, print_note, spinner
from shrinkpoint.errors import PolicyError


class ExportForm(str, Enum):
    """The formats that `--to` names."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_FORM_OF_SUFFIX = {
    ".safetensors": ExportForm.SAFETENSORS,
    ".pt": ExportForm.TORCH,
    ".pth": ExportForm.TORCH,
    ".bin": ExportForm.TORCH,
}


def command(
    place: LocationArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    step: StepOption = None,
    to: Annotated[
        ExportForm | None,
        typer.Option("--to", help="The format; if not given, OUT's suffix says it.", show_default=False),
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
    location, form = parse_location(place, step), to or _form_from_suffix(out)
    if out.exists() and not force:
        raise PolicyError(str(out), found="a file that exists", expected="a new name", do="add --force to replace it")
    from shrinkpoint.cli.export_write import write_export

    with spinner(f"writing {out}"):
        result = write_export(location, out, as_torch=form is ExportForm.TORCH, patterns=only or [])
    if json:
        document = {
            "from": str(location),
            "out": str(out),
            "to": form.value,
            "tensors": result.tensors,
            "bytes": result.nbytes,
        }
        print_json({**document, "left_out": result.num_omitted, "converted": result.num_converted})
        return
    size = f"{humanize.count(result.tensors, 'tensor')}, {humanize.size(result.nbytes)}"
    print_line(f"{out}: {size}, {form.value}, from {location}")
    if result.num_omitted:
        print_note(
            f"{humanize.count(result.num_omitted, 'plain value')} left out: "
            "safetensors holds tensors only (--to torch has all)"
        )
    if result.num_converted:
        print_note(
            f"{humanize.count(result.num_converted, 'numpy value')} became tensors and numbers, "
            "which weights_only=True can open"
        )


def _form_from_suffix(out: Path) -> ExportForm:
    if out.suffix not in _FORM_OF_SUFFIX:
        expected = ", ".join(_FORM_OF_SUFFIX)
        raise PolicyError(
            str(out), found=f"the suffix {out.suffix!r}", expected=expected, do="say --to torch or safetensors"
        )
    return _FORM_OF_SUFFIX[out.suffix]
