"""`shrinkpoint-lab demo`: a training run is killed in the middle of a save, and resumed."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli.arguments import JsonOption
from shrinkpoint.cli.console import ExitCode, print_json


def command(
    store: Annotated[Path, typer.Option("--store", help="Directory for the checkpoints.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option("--steps", min=20, help="Length of the run.")] = 100,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps between two checkpoints.")] = 10,
    disturb: Annotated[
        str | None,
        typer.Option("--disturb", metavar="RUN:STEP", help="Change one bit of a weight of that run after that step."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="PATH.svg", help="Also draw what the terminal shows.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train a small GPT, kill it with SIGKILL in the middle of a save, resume, compare bit for bit.

    Exit code 1 if the resumed run does not end where a run that was never killed ends.
    """
    from rich.console import Console

    from shrinkpoint_lab.demo.run import run_demo
    from shrinkpoint_lab.demo.scenario import DemoOptions

    disturbance = None if disturb is None else parse_disturbance(disturb)
    options = DemoOptions(store=store, steps=steps, every=every, disturb=disturbance)
    passed = run_demo(options, Console(stderr=json), picture)
    if json:
        print_json(jsonlib.loads(options.record_path.read_text()))
    if not passed:
        raise typer.Exit(ExitCode.FINDINGS)


def parse_disturbance(text: str) -> tuple[str, int]:
    """The run and the step of `--disturb`; raises typer's error of usage.

    >>> parse_disturbance("killed:35")
    ('killed', 35)
    """
    run, _, step = text.rpartition(":")
    if not run or not step.isdecimal():
        raise typer.BadParameter(f"{text!r} is not RUN:STEP, such as killed:35")
    return run, int(step)
