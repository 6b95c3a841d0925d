"""A headless browser that opens pages from files, and what it saw: errors, requests, marks, hovers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MUST_BROWSE = "CHECKFLOW_MUST_BROWSE"
WAIT_SECONDS = 60  # for a page, however busy the machine is


def programs() -> tuple[str, str]:
    """The browser and its driver. Without them a test is skipped, or fails where ``CHECKFLOW_MUST_BROWSE`` is set."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "there is no chromium or no chromedriver"
        if os.environ.get(MUST_BROWSE, "") not in ("", "0"):
            pytest.fail(f"{MUST_BROWSE} is set, and {reason}")
        pytest.skip(reason)
    return browser, driver


class Browser:
    """One browser for several pages."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1280, height: int = 1600, dark: bool = False) -> None:
        """Open a page and wait until its charts are drawn. What was seen before is forgotten."""
        command = self.driver.execute_cdp_cmd
        phone = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        command("Emulation.setDeviceMetricsOverride", phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.errors(), self.requests()
        self.driver.get(page.as_uri())
        self.wait('[...document.querySelectorAll(".chart")].every(chart => chart.querySelector(".main-svg"))')

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, WAIT_SECONDS, 0.05).until(
            lambda driver: driver.execute_script(f"return {condition}")
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def errors(self) -> list[str]:
        """Whatever the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def marks(self, chart: str) -> int:
        """How many bars of any length a chart shows."""
        script = """
            const bars = [...document.querySelectorAll(`#${arguments[0]} .barlayer .point path`)];
            const boxes = bars.map(bar => bar.getBoundingClientRect());
            return boxes.filter(box => box.width > 0 && box.height > 0).length;
        """
        count: int = self.run(script, chart)
        return count

    def data(self, chart: str) -> list[dict[str, Any]]:
        """The traces of a chart, as its library holds them."""
        script = "return JSON.stringify(document.getElementById(arguments[0]).data)"
        found: list[dict[str, Any]] = json.loads(self.run(script, chart))
        return found

    def fact(self, name: str) -> float:
        """The exact value behind a figure of the page."""
        return float(self.run("return document.querySelector(`[data-fact=${arguments[0]}]`).dataset.value", name))

    def hover(self, chart: str, trace: str, index: int) -> list[str]:
        """Point at a mark of a trace; the lines that appear."""
        from selenium.webdriver.common.action_chains import ActionChains

        script = """
            const box = document.getElementById(arguments[0]);
            box.scrollIntoView({block: "center"});
            const bars = [...box.querySelectorAll(".barlayer .trace")];
            const found = bars.find(bar => bar.__data__[0].trace.name === arguments[1]);
            const edges = found.querySelectorAll(".point path")[arguments[2]].getBoundingClientRect();
            return [edges.left + edges.width / 2, edges.top + edges.height / 2];
        """
        x, y = self.run(script, chart, trace, index)
        actions = ActionChains(self.driver, duration=0)
        for step in (-1, 0):  # plotly looks where the pointer moves to
            actions.w3c_actions.pointer_action.move_to_location(int(x) + step, int(y))
        actions.perform()
        self.wait(f'document.querySelector("#{chart} .hovertext text.nums") !== null')
        lines: list[str] = self.run(
            """return [...document.querySelectorAll(`#${arguments[0]} .hovertext text.nums`)]
                .flatMap(text => text.querySelector("tspan.line") ?
                    [...text.querySelectorAll("tspan.line")].map(line => line.textContent) : [text.textContent])""",
            chart,
        )
        return lines


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser without a window, and without a profile of anyone's."""
    program, service = programs()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})  # type: ignore[no-untyped-call]
    driver = webdriver.Chrome(options=options, service=Service(service))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
