"""The report in a real browser: whole, quiet, readable, light and dark, wide and narrow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_app.inference.evaluations import evaluate_run
from raytrain_app.inference.trained import load_trained
from raytrain_app.report.comparison import comparison_report
from raytrain_app.report.evaluations import read_evaluation
from raytrain_app.report.pages import gather, run_report
from tests.integration.report.conftest import Run

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESK = 360, 1280


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a screen."""
    selenium = pytest.importorskip("selenium")
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        pytest.skip("Chromium and its driver are not installed; on Debian: apt-get install chromium chromium-driver")
    assert selenium
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(found[0])
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(found[1])))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A report and a comparison."""
    evaluate_run(load_trained(run.folder), run.folder, "test")
    material = gather(run.folder, read_evaluation(run.folder))
    folder = tmp_path_factory.mktemp("pages")
    paths = [folder / "run.html", folder / "comparison.html"]
    paths[0].write_text(run_report(material).html, encoding="utf-8")
    paths[1].write_text(comparison_report([material, material]).html, encoding="utf-8")
    return paths


def look(browser: Any, page: Path, width: int, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_pages_are_whole_and_quiet(browser: Any, pages: list[Path], width: int, scheme: str) -> None:
    for page in pages:
        look(browser, page, width, scheme)
        assert browser.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script("return [...document.images].every(image => image.complete && image.naturalWidth > 0)")


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_text_is_large_enough_and_stands_out(browser: Any, pages: list[Path], width: int) -> None:
    sizes = """
        return [...document.querySelectorAll('svg text, p, td, dt, dd, span, b')].filter(e => e.textContent.trim()).map(e => {
            const svg = e.closest('svg');
            const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
            return parseFloat(getComputedStyle(e).fontSize) * scale;
        })"""
    contrast = """
        const light = c => {
            const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3)
                .map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = light(getComputedStyle(document.body).backgroundColor);
        return [...document.querySelectorAll('p, td, th, h1, h2, dt, dd, figcaption')].map(e => {
            const ink = light(getComputedStyle(e).color);
            return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
        })"""
    for page in pages:
        for scheme in ("light", "dark"):
            look(browser, page, width, scheme)
            assert min(browser.execute_script(sizes)) >= 8.5
            assert min(browser.execute_script(contrast)) >= 4.5  # WCAG AA


def test_light_is_light_and_dark_is_dark(browser: Any, pages: list[Path]) -> None:
    color_of = "getComputedStyle(document.querySelector(q)).backgroundColor.match(/\\d+/g).map(Number)"
    script = f"return ['body', '.chart'].map(q => {color_of})"
    for scheme in ("light", "dark"):
        look(browser, pages[0], DESK, scheme)
        for color in browser.execute_script(script):
            assert (sum(color[:3]) > 600) == (scheme == "light")


def test_values_show_under_the_pointer(browser: Any, pages: list[Path], run: Run) -> None:
    look(browser, pages[0], DESK, "light")
    browser.execute_script("document.querySelector('svg[data-hover]').scrollIntoView({block: 'center'})")
    script = """
        const svg = document.querySelector('svg[data-hover]'), place = svg.getBoundingClientRect();
        const [left, right] = JSON.parse(svg.dataset.hover).box, scale = place.width / svg.viewBox.baseVal.width;
        const at = {clientX: place.left + arguments[0] * scale * (right - left) + left * scale,
            clientY: place.top + place.height / 2};
        svg.dispatchEvent(new PointerEvent('pointermove', {...at, bubbles: true}));
        return [document.getElementById('tip').hidden, document.getElementById('tip').innerText]"""
    hidden, text = browser.execute_script(script, 1.0)
    assert not hidden
    assert f"validation {run.result['val_loss']:.4g}" in text
    browser.execute_script("document.querySelector('svg[data-hover]').dispatchEvent(new PointerEvent('pointerleave'))")
    assert browser.execute_script("return document.getElementById('tip').hidden")
