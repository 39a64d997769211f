"""`shrinkpoint export`: a checkpoint in a form that needs no shrinkpoint to read, or as a small file of ours alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import (
    THRESHOLD_HELP,
    HigherIsBetterOption,
    JsonOption,
    Location,
    LocationArgument,
    StepOption,
    decode_location,
    import_function,
    parse_location,
    parse_share,
)
from shrinkpoint.cli.bucket_files import local_target, show_place
from shrinkpoint.cli.console import print_json, print_line, print_loss_warnings, print_note, show_progress
from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.storage import is_object_url
from shrinkpoint.store import layout

if TYPE_CHECKING:
    from shrinkpoint.schemes.base import Scheme


class ExportForm(str, Enum):
    """The formats that `--to` names."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_FORM_OF_SUFFIX = {".safetensors": ExportForm.SAFETENSORS} | dict.fromkeys((".pt", ".pth", ".bin"), ExportForm.TORCH)
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; with --hf, the directory.")]
FormOption = Annotated[ExportForm | None, typer.Option("--to", help="The format; default: by OUT's suffix.")]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="GLOB", help='Only matching names, such as "model.*"; repeatable.')
]
HfOption = Annotated[
    bool, typer.Option("--hf", help="Write the model as a directory for from_pretrained of Hugging Face.")
]
ShardOption = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="SIZE", help="With --hf: largest file of weights, such as 5GB."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="With --hf: config.json, if it is elsewhere.")
]
_SCHEME_HELP = 'Write one self-contained file of shrinkpoint, compressed by this: "fisher(relative_error=0.6)".'
SchemeOption = Annotated[str | None, typer.Option("--scheme", metavar="SCHEME", help=_SCHEME_HELP)]
_CALIBRATE_HELP = "With --scheme fisher: function that gets the state and returns or yields losses of some batches."
CalibrateOption = Annotated[str | None, typer.Option("--calibrate", metavar="MODULE:FUNCTION", help=_CALIBRATE_HELP)]
_EVALUATE_HELP = "With --scheme: function that gets the state and returns its loss; for schemes that measure."
EvaluateOption = Annotated[str | None, typer.Option("--evaluate", metavar="MODULE:FUNCTION", help=_EVALUATE_HELP)]
_DEFAULT_THRESHOLD = "1%"
SchemeThresholdOption = Annotated[
    str | None,  # None where it is not given: without --scheme it means nothing
    typer.Option("--threshold", metavar="SHARE", help=THRESHOLD_HELP, show_default=_DEFAULT_THRESHOLD),
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
    scheme: SchemeOption = None,
    calibrate: CalibrateOption = None,
    evaluate: EvaluateOption = None,
    higher: HigherIsBetterOption = False,
    threshold: SchemeThresholdOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as safetensors, as a torch file, as a directory for Hugging Face, or as one small file.

    safetensors: every tensor by name, without plain values. torch: the whole nested state, for torch.load(OUT,
    weights_only=True). With --hf: config.json, the weights, and the tokenizer's files from beside config.json. With
    --scheme: a file that shrinkpoint.load reads.
    """
    location = parse_location(place, step)
    _check_no_payload(out)
    measuring = {"--calibrate": calibrate, "--evaluate": evaluate, "--higher-is-better": higher}
    _check_needed("--scheme", scheme is not None, {**measuring, "--threshold": threshold})
    _check_needed("--hf", hf, {"--max-shard-size": max_shard_size, "--config": config})
    if scheme is not None and (hf or to is not None):
        raise PolicyError("--scheme", found="--to or --hf as well", expected="one form", do="leave out the others")
    if hf:
        if to is not None or only:
            raise PolicyError("--hf", found="--to or --only as well", expected="--hf alone", do="leave out the others")
        _check_new(out, force, "a path that exists")
        _export_pretrained(location, out, config, max_shard_size, force, json)
        return
    _check_target(out, force)
    if scheme is not None:
        from shrinkpoint.schemes.registry import make_scheme

        made = make_scheme(
            scheme,
            evaluate=None if evaluate is None else import_function(evaluate, "--evaluate"),
            threshold=parse_share(_DEFAULT_THRESHOLD if threshold is None else threshold),
            higher_is_better=higher,
            calibrate=None if calibrate is None else import_function(calibrate, "--calibrate"),
        )
        _export_compressed(location, out, made, only or (), force, json)
        return
    if to is None and out.suffix not in _FORM_OF_SUFFIX:
        found, do = f"the suffix {out.suffix!r}", "add --to torch or --to safetensors"
        raise PolicyError(str(out), found=found, expected="one of " + ", ".join(_FORM_OF_SUFFIX), do=do)
    _export_plain(location, out, to or _FORM_OF_SUFFIX[out.suffix], only or (), force, json)


def _check_needed(option: str, is_given: bool, others: Mapping[str, object]) -> None:
    """Refuse options that mean nothing without another one; `others` has the value of each, None or False if absent."""
    names = [] if is_given else [name for name, value in others.items() if value not in (None, False)]
    if names:
        found = " and ".join(names)
        raise PolicyError("export", found=found, expected=f"{option} as well", do=f"add {option}, or leave out {found}")


def _check_target(out: Path, force: bool) -> None:
    if is_object_url(out):
        return
    if out.is_dir():
        do = "name a file in it, or add --hf for a model's directory"
        raise PolicyError(str(out), found="a directory", expected="a file to write", do=do)
    _check_new(out, force, "a file that exists")


def _check_new(out: Path, force: bool, found: str) -> None:
    if not is_object_url(out) and out.exists() and not force:
        raise PolicyError(str(out), found=found, expected="a new name", do="add --force to replace it")


def _check_no_payload(out: Path) -> None:
    """Refuse the name of a file that a checkpoint of ours consists of, which --force would replace."""
    own = [layout.is_own_name(name) for name in (out.name, f"{out.parent.name}/{out.name}")]
    beside = (out.parent, out.parent.parent)
    is_checkpoint = any(
        layout.step_of_dir(path.name) is not None or (not is_object_url(out) and (path / layout.MANIFEST).is_file())
        for is_own, path in zip(own, beside, strict=True)
        if is_own
    )
    if is_checkpoint:
        do = "choose a name outside of the store"
        raise PolicyError(show_place(out), found="a file of a checkpoint", expected="another place", do=do)


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
    files = humanize.count(len(report.files), "file")
    print_line(f"{show_place(out)}: {size} in {files} for from_pretrained, from {location}")


def _export_compressed(
    location: Location, out: Path, scheme: Scheme, only: Sequence[str], force: bool, json: bool
) -> None:
    from shrinkpoint.convert.export import select_state
    from shrinkpoint.store.checkpoint_file import build_state
    from shrinkpoint.store.single_file import save

    title = f"writing {show_place(out)}"
    with show_progress(title), local_target(out, force=force) as path, print_loss_warnings():
        state = select_state(build_state(decode_location(location), str(location)), only)
        if state is None:
            raise _nothing_like(only, location)
        report = save(state, path, scheme=scheme)
    tensors = sum(role.tensors for role in report.roles.values())
    if json:
        document = {"from": str(location), "out": show_place(out), "to": "shrinkpoint", "tensors": tensors}
        sizes = {"bytes": report.stored_bytes, "raw_bytes": report.raw_bytes, "ratio": report.ratio}
        print_json({**document, **sizes, "scheme": report.scheme})
        return
    size = f"{humanize.count(tensors, 'tensor')}, {humanize.size(report.stored_bytes)}"
    print_line(f"{show_place(out)}: {size}, {report.ratio:.1f}x smaller ({report.scheme}), from {location}")


def _export_plain(
    location: Location, out: Path, form: ExportForm, only: Sequence[str], force: bool, json: bool
) -> None:
    from shrinkpoint.convert.export import write_state
    from shrinkpoint.store.checkpoint_file import build_state

    with show_progress(f"writing {show_place(out)}"), local_target(out, force=force) as path:
        state = build_state(decode_location(location), str(location))
        counts = write_state(state, path, as_torch=form is ExportForm.TORCH, patterns=only)
    if counts is None:
        raise _nothing_like(only, location)
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


def _nothing_like(patterns: Sequence[str], location: Location) -> NotFoundError:
    do = f"see `shrinkpoint show {shlex.quote(str(location.path))} --tensors --values`"
    return NotFoundError(str(location), found=f"nothing named like {' or '.join(patterns)}", do=do)
