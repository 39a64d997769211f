"""`shrinkpoint convert`: checkpoints that others wrote into ours, and back."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli.arguments import HigherIsBetterOption, JsonOption, ThresholdOption, parse_share
from shrinkpoint.errors import PolicyError


class ConvertForm(str, Enum):
    """The forms that `--to` names."""

    SHRINKPOINT = "shrinkpoint"
    ORIGINAL = "original"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


SourceArgument = Annotated[
    Path, typer.Argument(metavar="SRC", help="A file, a directory, a whole run, a store.", show_default=False)
]
TargetArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="DST", help="A store, a .safetensors file of ours, or where to restore to.", show_default=False
    ),
]
FormOption = Annotated[
    ConvertForm | None,
    typer.Option(
        "--to",
        help="What to write; else a store from what is not ours, and what it was from what is.",
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Write nothing; tell how much it would save.")]
OneStepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="Only the checkpoint of this step.")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="GLOB",
        help='Only checkpoints of a run that are named so, e.g. "*.ckpt"; may be given again.',
        show_default=False,
    ),
]
SchemeOption = Annotated[
    str, typer.Option("--scheme", metavar="SCHEME", help='How to compress, such as "fisher(relative_error=.3)".')
]
EvaluateOption = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        metavar="MODULE:FUNCTION",
        help="Gets a converted state, returns a loss; for schemes that search.",
        show_default=False,
    ),
]
KeyframeOption = Annotated[
    int, typer.Option("--keyframe-every", min=1, help="Checkpoints in a chain, its keyframe included.")
]
NoVerifyOption = Annotated[
    bool, typer.Option("--no-verify", help="Do not decode what was written to compare it with SRC.")
]
OpaqueOption = Annotated[
    bool,
    typer.Option(
        "--opaque",
        help="Take files of a directory that cannot be read without running them along as they are, however large.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is at DST and differs.")]


def command(
    source: SourceArgument,
    out: TargetArgument = None,
    to: FormOption = None,
    dry_run: DryRunOption = False,
    step: OneStepOption = None,
    only: OnlyOption = None,
    scheme: SchemeOption = "lossless",
    evaluate: EvaluateOption = None,
    higher: HigherIsBetterOption = False,
    threshold: ThresholdOption = "1%",
    keyframe_every: KeyframeOption = 20,
    no_verify: NoVerifyOption = False,
    opaque: OpaqueOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Convert torch, safetensors, DCP, Hugging Face, Lightning and Accelerate checkpoints into ours, and back.

    A directory of checkpoints becomes one chain, in the order of the steps in their names. Nothing in a file is ever
    run. What was written is decoded and compared with SRC, bit for bit.
    """
    if out is None and not dry_run:
        raise PolicyError("convert", found="no DST", expected="where to write", do="name it, or add --dry-run")
    from shrinkpoint.cli.convert_run import ConvertOptions, export_run, import_run
    from shrinkpoint.convert.discover import discover

    options = ConvertOptions(
        source=source,
        out=out,
        scheme=scheme,
        evaluate=evaluate,
        threshold=parse_share(threshold),
        higher_is_better=higher,
        keyframe_every=keyframe_every,
        verify=not no_verify,
        opaque=opaque,
        force=force,
        json=json,
    )
    series = discover(source, only=only or [], step=step)
    form = to or (ConvertForm.ORIGINAL if series.checkpoints[0].is_ours else ConvertForm.SHRINKPOINT)
    if form is ConvertForm.SHRINKPOINT:
        import_run(series, options, dry_run=dry_run)
        return
    if dry_run or out is None:
        found, expected = f"--dry-run with --to {form.value}", "a conversion into ours"
        raise PolicyError("convert", found=found, expected=expected, do="say --to shrinkpoint")
    export_run(series, out, options, form.value)
