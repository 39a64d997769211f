"""Checks that no package is larger than `[tool.shrinkpoint.budgets]` of pyproject.toml allows. `make check` runs it.

A budget may be lowered and never raised: a package that needs room gets it from code that goes.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "shrinkpoint"


def lines_by_package() -> tuple[Counter[str], int]:
    """Lines of Python of each package ("top" for modules beside them), and the number of files."""
    lines, files = Counter[str](), 0
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts
        lines[inside[0] if len(inside) > 1 else "top"] += len(path.read_text().splitlines())
        files += 1
    return lines, files


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["shrinkpoint"]["budgets"]
    lines, files = lines_by_package()
    counts = {**lines, "all": sum(lines.values()), "files": files}
    over = [f"{name}: {count} lines" for name, count in counts.items() if count > budgets.get(name, 0)]
    if over:
        print("Over the budget of pyproject.toml:", *over, sep="\n  ")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
