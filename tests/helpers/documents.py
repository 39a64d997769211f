"""The blocks of code in the documents, and how those without prompts are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from doctest import ELLIPSIS, OutputChecker
from io import StringIO
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from shrinkpoint.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its path from the root.
        line: number of its first line.
        language: what stands behind the fence.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def has_prompts(self) -> bool:
        return self.text.startswith(">>> ")

    def run(self, names: dict[str, Any]) -> str:
        """Run it as a part of a program that has these names; tracebacks name the page and its lines.

        What it prints must be what its lines that begin with `# -> ` state, if there are such lines.

        Returns:
            What it printed if it states something, else nothing.
        """
        code = compile("\n" * (self.line - 1) + self.text, self.page, "exec")
        stated = [line.strip()[5:] + "\n" for line in self.text.splitlines() if line.strip().startswith("# -> ")]
        if not stated:
            exec(code, names)
            return ""
        with redirect_stdout(StringIO()) as printed:
            exec(code, names)
        expected, found = "".join(stated), printed.getvalue()
        assert OutputChecker().check_output(expected, found, ELLIPSIS), f"{self.page}:{self.line} printed\n{found}"
        return found


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCED.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


def run_plain_blocks(
    page: str, setup: Callable[[int], Mapping[str, Any]] = lambda number: {}, *, commands: bool = False
) -> dict[str, Any]:
    """Run the Python blocks of a page that have no prompts, one after the other, in one namespace.

    Args:
        setup: what a block takes from the reader's own program, by the block's number.
        commands: run the lines of "bash" blocks that call `shrinkpoint`, too.

    Returns:
        The names that there are afterwards.
    """
    names: dict[str, Any] = {"__name__": page}
    blocks = [block for block in all_blocks() if block.page == page]
    number = 0
    for block in blocks:
        if block.language == "python" and not block.has_prompts:
            names |= setup(number)
            block.run(names)
            number += 1
        elif block.language == "bash" and commands:
            for line in block.text.splitlines():
                if line.startswith("shrinkpoint "):
                    ran = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
                    assert ran.exit_code == 0, f"{page}:{block.line}: {line}: {ran.output}"
    return names
