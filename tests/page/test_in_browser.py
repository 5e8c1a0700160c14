"""The page in a real browser: everything is drawn, hostile text stays text, and every control is reached by keys."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.job import events
from psctl.page.board import Board
from psctl.page.history import JobHistory
from psctl.page.render import render
from psctl.page.server import PageServer
from tests.helpers.browser import CHROMIUM, Browser
from tests.page.sample import HOSTILE, job_events, newest_steps
from tests.page.test_render import page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; as root, make system installs it"),
    pytest.mark.xdist_group("browser"),
]

ACTIVE = """(() => {
    const a = document.activeElement;
    return a.tagName + ' ' + (a.hash || a.type || a.getAttribute('aria-label') || '');
})()"""
"""The name of the element that has the keyboard."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()
    assert made.problems == []


def written(folder: Path, *names: str, hostile: str = "") -> str:
    (folder / "page.html").write_text(render(page(*names, hostile=hostile), title="psctl", live=False))
    return f"file://{folder}/page.html"


def test_everything_is_drawn_and_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, "mine-1", "mine-2", hostile=HOSTILE))
    assert browser.value("document.title") == "psctl", "the text did not run"
    assert browser.value("document.querySelectorAll('#page img, #page script').length") == 0
    text = browser.value("document.getElementById('page').textContent")
    assert "step 40 </script><script>document.title = 'OWNED'</script><img src=x onerror=" in text
    for expected in (
        "mine-2",
        "examples/s",
        "worker/1",
        "ring, measured",
        "/data/mine-1",
        "killed by signal 9",
        "50 MB/s",
        "Value",
    ):
        assert expected in text, expected
    assert browser.value("document.querySelectorAll('.uplot').length") == 2 + 2 + 2 + 4, (
        "metrics, rates, seconds of a step, traffic"
    )
    assert browser.value("document.querySelectorAll('svg.network > .host').length") == 4
    assert browser.value("document.querySelectorAll('svg.network .gpu').length") == 4
    assert browser.value("document.querySelectorAll('svg.network .flow').length") == 4
    assert browser.value("document.querySelectorAll('svg.network .link.full').length") == 0
    assert browser.value("document.querySelectorAll('canvas.lanes').length") == 2
    sections = browser.value("[...document.querySelectorAll('section')].map((each) => each.id)")
    assert sections == [
        "overview",
        "metrics",
        "throughput",
        "processes",
        "steps",
        "network",
        "plan",
        "checkpoints",
        "events",
        "logs",
    ]
    assert sections == browser.value("[...document.querySelectorAll('nav a')].map((each) => each.hash.slice(1))")
    drawn = (
        "[...document.querySelectorAll('canvas')].every((each) => each.getContext('2d').getImageData(0, 0, each.width, "
    )
    assert browser.value(drawn + "each.height).data.some((value) => value > 0))"), "no canvas is empty"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 900, 2000])
def test_it_fits_windows_of_every_width_in_light_and_dark(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    browser.open(written(tmp_path, "mine-1"), width=width, scheme=scheme)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(251, 251, 250)") == (scheme == "light")
    frames = "[...document.querySelectorAll('.uplot')].every((each) => "
    browser.until(frames + "Math.abs(each.parentNode.clientWidth - each.clientWidth) <= 1)")
    shot = browser.screenshot()
    assert struct.unpack(">II", shot[16:24]) == (width, 900)


def test_every_control_is_reached_and_used_by_keys(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, "mine-1", "mine-2"))
    controls = browser.value("document.querySelectorAll('a, select, input, [tabindex]').length")
    seen = set()
    for _ in range(controls + 2):
        browser.press("Tab")
        active = browser.value(ACTIVE)
        seen.add(active)
        if active == "INPUT checkbox":
            before = browser.value("document.querySelector('input[type=checkbox]').checked")
            browser.press(" ")
            assert browser.value("document.querySelector('input[type=checkbox]').checked") != before
    assert {"A #overview", "INPUT radio", "INPUT checkbox", "INPUT text", "DIV printed lines"} <= seen, seen
    assert "DIV processes of mine-2" in seen


def test_the_last_steps_of_a_job_that_has_ended_show_pushes_and_pulls(browser: Browser, tmp_path: Path) -> None:
    board, history = Board(), JobHistory("mine-1", "lab")
    for event in job_events("mine-1"):
        history.apply(event)
    spans = [
        ("forward", 40, 0, 50_000), ("synchronize", 40, 5_000, 20_000), ("pull", 40, 0, 20_000),
        ("push", 40, 60_000, 70_000), ("backward", 40, 50_000, 90_000), ("step", 40, 0, 90_000),
    ]  # fmt: skip
    history.apply(events.LastSteps(time=1.0, rank=0, host="node-0", spans=spans, exact=True))
    board.add(history)
    (tmp_path / "page.html").write_text(render(board.document()[1], title="psctl", live=False))
    browser.open(f"file://{tmp_path}/page.html", width=400)
    kinds = browser.value("[...document.querySelectorAll('svg.steps rect')].map((each) => each.className.baseVal)")
    assert "part-compute" in kinds and kinds.index("part-sync") < kinds.index("part-compute backward")
    assert {"part-push", "part-pull"} < set(kinds)
    assert "all times are of one clock" in browser.value("document.querySelector('#steps').textContent")
    assert browser.value("document.documentElement.scrollWidth") <= 400
    box = "document.querySelector('svg.steps').parentNode"
    assert browser.value(f"{box}.scrollWidth > {box}.clientWidth"), "it scrolls within its card"


def test_lines_are_filtered(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, "mine-1"))
    browser.value("(() => { const f = document.querySelector('input[type=text]'); f.value = 'STEP 4'; "
                  "f.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert browser.value("document.querySelectorAll('.log div').length") == 2, "step 4 and step 40"


def test_a_live_page_shows_what_comes_after_it_was_opened(browser: Browser) -> None:
    board = Board()
    board.add(JobHistory("mine-1", "lab"))

    def open_job(name: str) -> bool:
        return board.add(JobHistory(name, "lab"))

    def show_steps(name: str) -> str:
        if name != "mine-1":
            return f"{name} makes no steps"
        board.set_steps(name, newest_steps())
        return ""

    server = PageServer(board, 0, open_job, show_steps)
    serving = threading.Thread(target=server.serve)
    serving.start()
    try:
        browser.open(server.url)
        browser.until("document.querySelector('[role=status]').textContent === 'live'")
        for event in job_events("mine-1"):
            board.apply("mine-1", event)
        browser.until("document.querySelector('.log').textContent.includes('step 40')")
        assert browser.value("document.querySelectorAll('.uplot').length") == 7
        board.set_known([{"job": "other-1", "state": "running"}])
        browser.until("[...document.querySelectorAll('option')].some((each) => each.value === 'other-1')")
        browser.value("(() => { const s = document.querySelector('header select'); s.value = 'other-1'; "
                      "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
        browser.until("document.querySelector('#overview').textContent.includes('other-1')")
        for name in ("mine-1", "other-1"):
            board.apply(name, events.StateChanged(time=1_700_000_100.0, role="job", rank=0, host="", state="running"))
        browser.until("document.querySelectorAll('#steps button').length === 2")
        browser.value("document.querySelectorAll('#steps button').forEach((each) => each.click())")
        browser.until("document.querySelector('#steps').textContent.includes('other-1 makes no steps')")
        browser.until("document.querySelectorAll('svg.steps rect').length === 6")
        text = browser.value("document.querySelector('#steps').textContent")
        assert "worker/1 on node-1" in text and "clocks of hosts agree to 20 us or better" in text
    finally:
        browser.call("Page.navigate", url="about:blank")
        server.stop()
        serving.join()
