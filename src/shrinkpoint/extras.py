"""What is not installed, and what would install it."""

from __future__ import annotations

from shrinkpoint.errors import MissingExtraError

EXTRAS = {
    "accelerate": ("accelerate",),
    "cli": ("typer", "rich"),
    "lightning": ("lightning", "torchmetrics"),
    "plot": ("plotly",),
    "transformers": ("transformers", "accelerate"),
}
"""The packages that each extra brings and that may be absent without it."""


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """What to raise where an import failed: with the command that helps, if `extra` brings the package; else `error`.

    >>> missing(ModuleNotFoundError("...", name="transformers.utils"), "transformers").do
    'run pip install "shrinkpoint[transformers]"'
    """
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtraError) or package not in EXTRAS[extra]:
        return error
    do = f'run pip install "shrinkpoint[{extra}]"'
    found = MissingExtraError(package, found="not installed", expected=f"what the extra {extra!r} brings", do=do)
    found.name = error.name
    return found
