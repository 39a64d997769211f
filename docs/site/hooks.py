"""Hooks of mkdocs: pages from above docs/, and what Markdown on GitHub has no words for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Documents that stand where people look for them in a checkout, and are pages of the site, too."""
EXAMPLES = ROOT / "examples"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents above docs/, and the examples."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=link_into_docs((ROOT / name).read_text(encoding="utf-8"))))
    files.append(File.generated(config, "examples/README.md", content=examples_page()))
    for path in EXAMPLES.glob("*.ipynb"):
        files.append(File.generated(config, f"examples/{path.name}", content=path.read_text(encoding="utf-8")))
    return files


def examples_page() -> str:
    """The list of the examples, and the source of each below it, to which the list links."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.glob("*.py"), key=lambda path: page.index(f"]({path.name})")):
        page = page.replace(f"]({path.name})", f"](#{path.name.replace('.', '')})")
        page += f"\n## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
    return page


def on_page_markdown(markdown: str, /, *, page: Page, **_: Any) -> str:
    """Turn links that leave docs/ into links of the site; examples with prompts are copied without them."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = markdown.replace("<!-- the table of README.md -->", readme_table())
    depth = page.file.src_uri.count("/")
    for name in ROOT_PAGES:
        markdown = markdown.replace(f"]({'../' * (depth + 1)}{name}", f"]({'../' * depth}{name}")
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/README.md#\1py)", markdown)
    markdown = markdown.replace("[docs/", "[")
    # In tables GitHub wants pipes within code escaped; here, the backslash would be shown.
    markdown = re.sub(r"(?m)^\|.*\|$", lambda row: re.sub(r"`[^`]*`", unescape_pipes, row[0]), markdown)
    markdown = re.sub(r"(?m)^```python\n(?=>>> )", "```pycon\n", markdown)
    return re.sub(r"(?m)^(>>> .*?) *# doctest: .*$", r"\1", markdown)


def readme_table() -> str:
    """The table of schemes in README.md, and what it says below of where and how that was measured."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return link_into_docs(text[text.index("| scheme |") : text.index("## In a loop")])


def link_into_docs(markdown: str) -> str:
    """A document of the root, with its links as if it stood in docs/."""
    return markdown.replace("](docs/", "](")


def unescape_pipes(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
