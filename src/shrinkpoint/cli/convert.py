"""`shrinkpoint convert`: checkpoints that others wrote into ours, and back."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli.location import JsonOption, ThresholdOption, parse_share
from shrinkpoint.errors import PolicyError


class ConvertForm(str, Enum):
    """What to write."""

    SHRINKPOINT = "shrinkpoint"
    ORIGINAL = "original"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


def command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A file, a directory, a whole run, a store.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="DST", help="A store, a .safetensors file of ours, or where to restore to.", show_default=False
        ),
    ] = None,
    to: Annotated[
        ConvertForm | None,
        typer.Option(
            "--to",
            help="What to write; else a store from what is not ours, and what it was from what is.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; tell how much it would save.")] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="Only the checkpoint of this step.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="GLOB",
            help='Only checkpoints of a run that are named so, e.g. "*.ckpt"; may be given again.',
            show_default=False,
        ),
    ] = None,
    scheme: Annotated[
        str, typer.Option("--scheme", metavar="SCHEME", help='How to compress, such as "fisher(relative_error=.3)".')
    ] = "lossless",
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="MODULE:FUNCTION",
            help="Gets a converted state, returns a loss; for schemes that search.",
            show_default=False,
        ),
    ] = None,
    higher: Annotated[bool, typer.Option("--higher-is-better", help="--evaluate returns a score, not a loss.")] = False,
    threshold: ThresholdOption = "1%",
    keyframe_every: Annotated[
        int, typer.Option("--keyframe-every", min=1, help="Checkpoints in a chain, its keyframe included.")
    ] = 20,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not decode what was written to compare it with SRC.")
    ] = False,
    opaque: Annotated[
        bool,
        typer.Option(
            "--opaque",
            help="Take files of a directory that cannot be read without running them along as they are, however large.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DST and differs.")] = False,
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

    wish = ConvertOptions(
        source,
        out,
        scheme,
        evaluate,
        parse_share(threshold),
        higher,
        keyframe_every,
        not no_verify,
        opaque,
        force,
        json,
    )
    found = discover(source, only=only or [], step=step)
    chosen = to or (ConvertForm.ORIGINAL if found.checkpoints[0].is_ours else ConvertForm.SHRINKPOINT)
    if chosen is ConvertForm.SHRINKPOINT:
        import_run(found, wish, dry_run=dry_run)
        return
    if dry_run or out is None:
        found_ = f"--dry-run with --to {chosen.value}"
        raise PolicyError("convert", found=found_, expected="a conversion into ours", do="say --to shrinkpoint")
    export_run(found, out, wish, chosen.value)
