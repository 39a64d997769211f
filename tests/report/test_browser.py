"""A page in a real browser: it draws, answers the mouse, changes its colors, and can be read by everybody."""

from __future__ import annotations

import pytest

import shrinkpoint as sp

selenium = pytest.importorskip("selenium")

from axe_core_python.selenium import Axe  # noqa: E402
from helpers.browser import NO_BROWSER, PATIENCE, open_browser, read_log  # noqa: E402
from report.test_page import make_store, report  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.skipif(NO_BROWSER is not None, reason=str(NO_BROWSER))


@pytest.fixture(scope="module")
def browser():
    with open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = make_store(folder / "exact"), make_store(folder / "lossy", sp.Fisher(relative_error=0.3))
    report(*runs, "--keep-last", 1, "--out", folder / "page.html")
    return (folder / "page.html").as_uri()


@pytest.fixture
def opened(browser, page):
    browser.get(page)
    return browser


MARK = """
    const match = arguments[0].getAttribute("d").match(/M(\\S+) (\\S+?)h0/);
    const area = arguments[0].ownerSVGElement.getBoundingClientRect();
    return [area.width * (match[1] / 1000 - 0.5), area.height * (match[2] / 1000 - 0.5)];
"""


def test_every_chart_is_drawn_and_nothing_is_complained_of(opened):
    charts = opened.find_elements(By.CSS_SELECTOR, ".chart > svg")
    assert len(charts) >= 6 and all(chart.size["width"] > 200 and chart.size["height"] > 200 for chart in charts)
    (marks,) = opened.find_elements(By.CSS_SELECTOR, "figure:first-child path.square.run0[data-rows]")
    assert marks.get_attribute("data-rows") == "0 3" and marks.get_attribute("d").count("h0") == 2
    assert len(opened.find_elements(By.CSS_SELECTOR, ".map div[data-tip]")) > 10
    labels = [label.text for label in opened.find_elements(By.CSS_SELECTOR, "figure:first-child .ys span")]
    assert labels and all(label.endswith((" B", "kB", "MB")) for label in labels)
    assert read_log(opened) == []


def test_a_mark_under_the_mouse_says_what_it_is(opened):
    mark = opened.find_element(By.CSS_SELECTOR, "figure:first-child path.square.run0")
    chart = opened.find_element(By.CSS_SELECTOR, "figure:first-child .chart > svg")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    x, y = opened.execute_script(MARK, mark)
    ActionChains(opened).move_to_element_with_offset(chart, round(x), round(y)).perform()
    tip = opened.find_element(By.ID, "tip")
    WebDriverWait(opened, PATIENCE).until(lambda _: tip.is_displayed())
    assert "step 10" in tip.text and "keyframe" in tip.text and "loss as before" in tip.text
    box = opened.find_element(By.CSS_SELECTOR, ".map div[data-tip]")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    ActionChains(opened).move_to_element(box).perform()
    WebDriverWait(opened, PATIENCE).until(lambda _: " of " in tip.text and "kB" in tip.text)
    assert read_log(opened) == []


def test_colors_can_be_switched(opened):
    def colors() -> list[str]:
        return opened.execute_script(
            "return [document.body, document.querySelector('.ys span'), document.querySelector('path.dot')]"
            ".map((e, i) => getComputedStyle(e)[['backgroundColor', 'color', 'stroke'][i]])"
        )

    first = colors()
    opened.find_element(By.ID, "theme").click()
    assert all(a != b for a, b in zip(first, colors(), strict=True))
    assert read_log(opened) == []


def test_it_fits_a_phone(opened):
    opened.set_window_size(400, 800)
    try:
        WebDriverWait(opened, PATIENCE).until(
            lambda driver: driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        )
        assert opened.execute_script("return window.innerWidth") <= 500
        cut = "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert opened.execute_script(cut) == 0
    finally:
        opened.set_window_size(1280, 1400)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(opened, theme):
    if opened.execute_script("return document.documentElement.dataset.theme") != theme:
        opened.find_element(By.ID, "theme").click()
    violations = Axe().run(opened)["violations"]
    assert not violations, [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in violations]
