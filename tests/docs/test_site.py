"""The site of the documents: it builds without a warning, reads nothing from elsewhere, and has every public name."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.documents import ROOT
from helpers.timeouts import PATIENCE
from selenium.webdriver.support.ui import WebDriverWait

import shrinkpoint
from shrinkpoint import comm, errors, schemes, storage, train
from shrinkpoint.train import accelerate, dcp, lightning, transformers

PUBLIC = [shrinkpoint, comm, schemes, train, dcp, accelerate, lightning, transformers]
"""What has a public `__all__`."""
if find_spec("torchtitan"):
    PUBLIC.append(train.torchtitan)
STORAGE = ("LocalStorage", "MemoryStorage", "ObjectCache", "Storage")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site is; any warning of mkdocs is an error: a broken link or anchor, a page that no menu has, ..."""
    pytest.importorskip("mkdocs")  # for Python 3.11 or newer
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    return out


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    documented = []
    for page in (site / "api").glob("*.html"):
        documented += [resolve(name) for name in re.findall(r'id="(shrinkpoint\.[\w.]+)"', page.read_text())]
    public = {f"{module.__name__}.{name}": getattr(module, name) for module in PUBLIC for name in module.__all__}
    public |= {f"storage.{name}": getattr(storage, name) for name in STORAGE}
    public |= {name: value for name, value in vars(errors).items() if is_exception(value)}
    missing = {name for name, value in public.items() if not any(value is obj for obj in documented)}
    assert missing - {"shrinkpoint.__version__", "shrinkpoint.errors"} == set()


def resolve(path: str) -> object:
    """What has this dotted name; None for an attribute of instances, or without the extra."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, errors.MissingExtraError):
        return None


def is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__


def test_reading_it_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)="?(?:https?:)?//', tag), f"{page.name}: {tag}"


def test_no_markup_is_left_over(site: Path) -> None:
    """Fences, tables and directives that were not understood stand in the text as they were written."""
    for page in site.rglob("*.html"):
        text = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", page.read_text())
        assert "\\|" not in re.sub(r"(?s)<pre\b.*?</pre>", "", page.read_text()), page.name
        for line in re.sub(r"<[^>]+>", "", text).splitlines():
            assert not re.match(r"\s*(```|\||::: |- - |#{1,6} )", line), f"{page.name}: {line}"


@pytest.mark.nightly
def test_pages_open_from_a_disk_in_a_browser(site: Path) -> None:
    """Every page fits a phone and logs nothing; the search finds; colors can be switched."""
    browser = pytest.importorskip("helpers.browser")
    if browser.NO_BROWSER:
        pytest.skip(browser.NO_BROWSER)
    with browser.open_browser() as driver:
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        for page in sorted(site.rglob("*.html")):
            if page.name != "404.html":  # is for servers: its paths begin at their root
                driver.get(page.as_uri())
                assert driver.execute_script("return document.documentElement.scrollWidth") <= 390, page.name
                assert browser.read_log(driver) == [], page.name
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.get((site / "tutorial.html").as_uri())
        field = driver.find_element("css selector", ".md-search__input")
        field.click()
        field.send_keys("keyframe_every")
        wait = WebDriverWait(driver, browser.PATIENCE)
        wait.until(lambda driver: "CheckpointManager" in driver.find_element("css selector", ".md-search").text)
        schemes = set()
        for _ in range(3):
            driver.execute_script("document.querySelector('.md-header__option label:not([hidden])').click()")
            schemes.add(driver.execute_script("return document.body.dataset.mdColorScheme"))
        assert schemes == {"default", "slate"}
        assert browser.read_log(driver) == []
