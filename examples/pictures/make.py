"""Makes the pictures of the README from a real run: two workers, of which one is killed and replaced; then three, then two.

    python examples/pictures/make.py

Needs Chromium and its driver (on Debian: apt-get install chromium chromium-driver) and the package's extra `dev`.
"""

from __future__ import annotations

import base64
import io
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from raytrain_app import runner
from raytrain_app.inference.evaluations import evaluate_run
from raytrain_app.inference.trained import load_trained
from raytrain_app.job import job_from_dict
from raytrain_app.report.pages import gather, run_report
from raytrain_app.report.screen import View, screen
from raytrain_app.report.updates import Update
from raytrain_app.report.watch import views
from raytrain_app.storage.folder import Folder
from raytrain_app.storage.requests import Requests
from raytrain_app.storage.rundir import RunDirectory

HERE = Path(__file__).parent
COLUMNS, LINES = 112, 34
WIDTH = 1180
HEIGHT = """
    const box = document.documentElement.viewBox?.baseVal, charts = document.querySelector('.charts');
    return box ? innerWidth * box.height / box.width : charts.getBoundingClientRect().bottom + 24;"""
"""Of the picture: that of an SVG in the window's width, or of a page down to its charts."""
JOB: dict[str, Any] = {
    "name": "digits",
    "task": "mnist",
    "model": {"name": "cnn"},
    "train": {"epochs": 14, "global_batch_size": 64, "virtual_shards": 4},
    "optimizer": {"name": "adam", "lr": 0.001},
    "scaling": {"workers": "1..2", "resources_per_worker": {"CPU": 0.5}},
    "checkpoint": {"every_steps": 200},
}


def main() -> None:
    """Trains, then draws."""
    with tempfile.TemporaryDirectory() as storage:
        # The page tells where the run is: a short name looks better than that of a temporary folder.
        os.chdir(storage)
        folder, view = train()
        evaluation = evaluate_run(load_trained(folder), folder, "test")
        Path("report.html").write_text(run_report(gather(folder, evaluation)).html, encoding="utf-8")
        console = Console(record=True, width=COLUMNS, height=LINES, force_terminal=True, file=io.StringIO())
        console.print(screen(view, COLUMNS, LINES))
        console.save_svg("watch.svg", title="raytrain watch digits")
        photograph(Path("report.html").resolve(), Path("watch.svg").resolve())


def train() -> tuple[Folder, View]:
    """Trains the job among disruptions; returns its directory and what `raytrain watch` showed after the last of them."""
    job = job_from_dict({**JOB, "storage": "runs"})
    directory, seen = Folder.open("runs/digits"), list[View]()

    def look() -> None:
        """Watches for some seconds, as the pace of the workers takes."""
        until_s = time.monotonic() + 4.0
        for view in views(directory):
            seen.append(view)
            if time.monotonic() > until_s or view.state.ended:
                return

    # What happens after so many steps that so many workers took together.
    stages: list[tuple[int, int, Callable[[], None]]] = [
        (2, 150, lambda: kill_one(directory)),
        (2, 150, lambda: ask(directory, 1, 3)),
        (3, 150, lambda: ask(directory, 1, 2)),
        (2, 50, look),
    ]
    steps = 0

    def act(update: Update) -> None:
        nonlocal steps
        if update.kind == "step" and stages:
            steps += update.record["workers"] == stages[0][0]
            if steps == stages[0][1]:
                steps = 0
                threading.Thread(target=stages.pop(0)[2], daemon=True).start()

    runner.run(job, on_update=act)
    assert seen, "the run ended before all had happened: give it more epochs"
    return directory, seen[-1]


def kill_one(directory: Folder) -> None:
    status: Mapping[str, Any] | None = RunDirectory(directory).read_status()
    assert status is not None
    os.kill(status["workers"][0]["pid"], signal.SIGKILL)


def ask(directory: Folder, least: int, most: int) -> None:
    Requests(directory).post({"kind": "scale", "least": least, "most": most})


def photograph(report: Path, watch: Path) -> None:
    """Saves pictures of the pages: the report in light and dark, and the terminal."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary, "Chromium is not installed; on Debian: apt-get install chromium"
    assert driver, "Chromium's driver is not installed; on Debian: apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        for scheme in ("light", "dark"):
            take(browser, report, HERE / f"report-{scheme}.png", scheme)
        take(browser, watch, HERE / "watch.png", "dark")
    finally:
        browser.quit()


def take(browser: Any, page: Path, to: Path, scheme: str) -> None:
    """Saves an SVG, or a report down to its charts, in so few colours that the file is small."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    height = 1
    for _ in range(2):  # an SVG is as high as it is wide, until it is told the height that it then has
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1.5, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        height = math.ceil(browser.execute_script(HEIGHT))
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)


if __name__ == "__main__":
    main()
