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
    WebDriverWait(browser, PATIENCE).until(
        lambda driver: driver.execute_script("return document.documentElement.dataset.drawn")
    )
    return browser


def test_every_figure_is_drawn_and_nothing_is_complained_of(opened):
    plots = opened.find_elements(By.CSS_SELECTOR, ".plot")
    drawn = opened.find_elements(By.CSS_SELECTOR, ".plot .main-svg")
    assert len(plots) >= 8 and len(
        {svg.find_element(By.XPATH, "ancestor::div[contains(@class,'plot ')]").id for svg in drawn}
    ) == len(plots)
    marks = opened.find_elements(By.CSS_SELECTOR, "#plot-0 .scatterlayer .points path")
    assert len(marks) == 8
    assert len(opened.find_elements(By.CSS_SELECTOR, ".treemaplayer .slice")) > 10
    assert read_log(opened) == []


def test_a_mark_under_the_mouse_says_what_it_is(opened):
    mark = opened.find_elements(By.CSS_SELECTOR, "#plot-0 .scatterlayer .points path")[0]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    ActionChains(opened).move_to_element(mark).perform()
    hover = WebDriverWait(opened, PATIENCE).until(
        lambda d: d.find_elements(By.CSS_SELECTOR, "#plot-0 .hoverlayer .hovertext")
    )
    assert "step 10" in hover[0].text and "keyframe" in hover[0].text
    assert read_log(opened) == []


def test_colors_and_what_boxes_show_can_be_switched(opened):
    def background() -> str:
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    def boxes() -> list[float]:
        return opened.execute_script(
            "return document.querySelector('.treemaplayer .slice').closest('.plot').data[0].values"
        )

    first = background()
    opened.find_element(By.ID, "theme").click()
    assert background() != first
    ink = opened.execute_script("return getComputedStyle(document.querySelector('#plot-0 .xtick text')).fill")
    assert ink == opened.execute_script("return getComputedStyle(document.body).color")
    before = boxes()
    raw = opened.find_elements(By.CSS_SELECTOR, "button[data-switch='1']")[0]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", raw)
    raw.click()
    assert raw.get_attribute("aria-pressed") == "true" and boxes()[0] > before[0]
    assert read_log(opened) == []


def test_it_fits_a_phone(opened):
    opened.set_window_size(400, 800)
    try:
        WebDriverWait(opened, PATIENCE).until(
            lambda driver: driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        )
        assert opened.execute_script("return window.innerWidth") <= 500
    finally:
        opened.set_window_size(1280, 1400)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(opened, theme):
    if opened.execute_script("return document.documentElement.dataset.theme") != theme:
        opened.find_element(By.ID, "theme").click()
    violations = Axe().run(opened)["violations"]
    assert not violations, [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in violations]
