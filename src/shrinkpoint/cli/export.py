"""`shrinkpoint export`: a checkpoint in a form that needs no shrinkpoint to read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import (
    JsonOption,
    Location,
    LocationArgument,
    StepOption,
    decode_location,
    parse_location,
)
from shrinkpoint.cli.bucket_files import local_target, show_place
from shrinkpoint.cli.console import print_json, print_line, print_note, show_progress
from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.storage import is_object_url


class ExportForm(str, Enum):
    """The formats that `--to` names."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_FORM_OF_SUFFIX = {".safetensors": ExportForm.SAFETENSORS} | dict.fromkeys((".pt", ".pth", ".bin"), ExportForm.TORCH)
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; with --hf, the directory.")]
FormOption = Annotated[ExportForm | None, typer.Option("--to", help="The format; if not given, OUT's suffix says it.")]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="GLOB", help='Only these, e.g. "model/*"; may be given again.'),
]
HfOption = Annotated[
    bool, typer.Option("--hf", help="Write the model as a directory that from_pretrained of Hugging Face reads.")
]
ShardOption = Annotated[
    str | None, typer.Option("--max-shard-size", metavar="SIZE", help="With --hf: size of a file of weights, 5GB.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="With --hf: config.json, if it is elsewhere."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]


def command(
    place: LocationArgument,
    out: OutArgument,
    step: StepOption = None,
    to: FormOption = None,
    only: OnlyOption = None,
    hf: HfOption = False,
    max_shard_size: ShardOption = None,
    config: ConfigOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as plain safetensors, as a torch file, or its model for Hugging Face.

    safetensors: every tensor under its name, and no plain values. torch: the whole state, nested as it was saved;
    torch.load(OUT, weights_only=True) opens it. With --hf: config.json, weights under the names of the architecture,
    and the files of a tokenizer that lie beside config.json.
    """
    location = parse_location(place, step)
    if hf:
        if to is not None or only:
            raise PolicyError("--hf", found="--to or --only as well", expected="one form", do="leave them out")
        _export_pretrained(location, out, config, max_shard_size, force, json)
        return
    if max_shard_size is not None or config is not None:
        found, do = "--max-shard-size or --config", "add --hf, or leave them out"
        raise PolicyError("export", found=found, expected="them with --hf", do=do)
    form = to or _form_from_suffix(out)
    if not is_object_url(out) and out.exists() and not force:
        raise PolicyError(str(out), found="a file that exists", expected="a new name", do="add --force to replace it")
    from shrinkpoint.convert.export import write_state
    from shrinkpoint.store.checkpoint_file import build_state

    with show_progress(f"writing {show_place(out)}"), local_target(out, force=force) as path:
        state = build_state(decode_location(location), str(location))
        counts = write_state(state, path, as_torch=form is ExportForm.TORCH, patterns=only or ())
    if counts is None:
        found = f"nothing named like {' or '.join(only or ())}"
        raise NotFoundError(str(location), found=found, do=f"see `shrinkpoint show {location.path} --tensors --values`")
    if json:
        document = {"from": str(location), "out": show_place(out), "to": form.value}
        sizes = {"tensors": counts.tensors, "bytes": counts.nbytes}
        print_json({**document, **sizes, "left_out": counts.num_omitted, "converted": counts.num_converted})
        return
    size = f"{humanize.count(counts.tensors, 'tensor')}, {humanize.size(counts.nbytes)}"
    print_line(f"{show_place(out)}: {size}, {form.value}, from {location}")
    if counts.num_omitted:
        values = humanize.count(counts.num_omitted, "plain value")
        print_note(f"{values} left out: safetensors holds tensors only (--to torch has all)")
    if counts.num_converted:
        values = humanize.count(counts.num_converted, "numpy value")
        print_note(f"{values} became tensors and numbers, which weights_only=True can open")


def _export_pretrained(
    location: Location, out: Path, config: Path | None, max_shard_size: str | None, force: bool, json: bool
) -> None:
    from shrinkpoint.train.transformers import export_pretrained

    with show_progress(f"writing {show_place(out)}"), local_target(out, force=force) as path:
        report = export_pretrained(
            location.path if isinstance(location.path, Path) else str(location.path),
            path,
            step=location.step,
            config=None if config is None else str(config),
            max_shard_size=max_shard_size,
            force=force,
        )
    if json:
        document = {"from": str(location), "out": show_place(out), "to": "hf", "tensors": report.tensors}
        print_json({**document, "bytes": report.nbytes, "files": [*report.files]})
        return
    size = f"{humanize.count(report.tensors, 'tensor')}, {humanize.size(report.nbytes)}"
    print_line(
        f"{show_place(out)}: {size} in {humanize.count(len(report.files), 'file')} for from_pretrained, from {location}"
    )


def _form_from_suffix(out: Path) -> ExportForm:
    if out.suffix not in _FORM_OF_SUFFIX:
        found, do = f"the suffix {out.suffix!r}", "say --to torch or safetensors"
        raise PolicyError(str(out), found=found, expected=", ".join(_FORM_OF_SUFFIX), do=do)
    return _FORM_OF_SUFFIX[out.suffix]
