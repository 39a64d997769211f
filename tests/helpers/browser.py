"""A real browser without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
NO_BROWSER = None if CHROMIUM and CHROMEDRIVER else "no Chromium with its driver (Debian: chromium, chromium-driver)"
"""Why no page can be opened here; None if one can."""
PATIENCE = 120  # seconds, on a busy machine
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,1400"),
)


@contextmanager
def open_browser() -> Iterator[webdriver.Chrome]:
    """Chromium, for the block; it keeps what pages log."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.set_script_timeout(PATIENCE)
    try:
        yield driver
    finally:
        driver.quit()


def read_log(driver: webdriver.Chrome) -> list[str]:
    """What pages have logged since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]
