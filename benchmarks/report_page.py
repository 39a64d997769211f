"""What a page of a store costs: seconds to write it, its bytes, and seconds until a browser has drawn it.

    python benchmarks/report_page.py                 # 10 and 2,000 checkpoints, Chromium and chromedriver on the PATH

Each store holds a small model with AdamW, saved again and again. A page is written by the command, in a process of its
own; Chromium, without a screen, opens it with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

import shrinkpoint as sp

HERE = Path(__file__).resolve().parent
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
)
DRAWN = "return document.documentElement.dataset.drawn"


def make_store(path: Path, count: int) -> None:
    """Save a small model after each of `count` steps."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    with sp.CheckpointManager(path) as manager:
        for step in range(count):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer, rng=False, metrics={"loss": 1 / (step + 1)})


def open_page(page: Path) -> float:
    """Seconds until a fresh browser has drawn every figure of a page."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit("no Chromium (Debian: chromium, chromium-driver)")
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        start = time.perf_counter()
        driver.get(page.as_uri())
        WebDriverWait(driver, 120, poll_frequency=0.02).until(lambda browser: browser.execute_script(DRAWN))
        return time.perf_counter() - start
    finally:
        driver.quit()


def measure(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """The row of one store."""
    store, page = folder / f"run-{count}", folder / f"page-{count}.html"
    make_store(store, count)
    writing, opening = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        command = [sys.executable, "-m", "shrinkpoint", "report", str(store), "--out", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        writing.append(time.perf_counter() - start)
        opening.append(open_page(page))
    medians = {"write_seconds": statistics.median(writing), "open_seconds": statistics.median(opening)}
    return {"checkpoints": count, "page_bytes": page.stat().st_size, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", nargs="+", type=int, default=[10, 2000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "report_page.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder), count, arguments.repeats) for count in arguments.counts]
    for row in rows:
        print(row)
    arguments.out.write_text(json.dumps({"date": date.today().isoformat(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
