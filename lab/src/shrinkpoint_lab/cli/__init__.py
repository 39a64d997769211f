"""The command line of the laboratory: `shrinkpoint-lab`, with the options and exit codes of `shrinkpoint`."""

from __future__ import annotations

import typer

from shrinkpoint.cli.app import EPILOG, ErrorHandlingGroup, global_options, refuse_urls
from shrinkpoint_lab.cli import bench, demo

app = typer.Typer(
    cls=ErrorHandlingGroup,
    name="shrinkpoint-lab",
    help="Compare schemes, and see a run killed and resumed.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.callback()(global_options)
app.command("bench")(refuse_urls(bench.command, takes_buckets=True))
app.command("demo")(refuse_urls(demo.command, takes_buckets=False))


def main() -> None:
    """Run `shrinkpoint-lab`, the console script."""
    app(prog_name="shrinkpoint-lab")
