"""The command line of a study that runs some trainings with some seeds, and the file that it writes."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.studies.harness import RESULTS, machine


def run_seeds(
    description: str | None,
    fill: Callable[[dict[str, Any], str, int, argparse.Namespace], None],
    report: Callable[[dict[str, Any]], None],
    *,
    section: str,
    out: str,
    **choices: Sequence[str],
) -> None:
    """Parse the command line, run each training with each seed on one thread, write the results and print the tables.

    Args:
        fill: adds what one training with one seed gives to a section of the document; gets the parsed arguments.
        report: prints the tables of a document.
        section: of the document.
        out: the name of the file in `RESULTS`.
        choices: names of which `--KEY` chooses some; the first key is that of the trainings.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, names in choices.items():
        parser.add_argument(f"--{key}", nargs="*", default=[*names])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--report", action="store_true", help="print the tables of what was written")
    arguments = parser.parse_args()
    if arguments.report:
        report(json.loads(arguments.out.read_text()))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    document: dict[str, Any] = {"machine": machine(), section: {}}
    for name in getattr(arguments, next(iter(choices))):
        for seed in arguments.seeds:
            fill(document[section], name, seed, arguments)
        arguments.out.write_text(json.dumps(document))
    report(document)
