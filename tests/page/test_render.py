"""The page as a file: it loads nothing, and its data cannot become markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

import pytest

from psctl.page.history import JobHistory
from psctl.page.render import embedded, render
from psctl.types import Document
from tests.page.sample import HOSTILE, failed, job_events


def page(*names: str, hostile: str = "") -> Document:
    jobs = {}
    for name in names:
        history = JobHistory(name, "lab")
        for event in (*job_events(name, hostile=hostile), failed(name, 40, hostile=hostile)):
            history.apply(event)
        jobs[name] = history.document()
    return {"jobs": jobs, "known": []}


@pytest.mark.parametrize("live", [False, True])
def test_only_the_pages_own_scripts_are_allowed_and_the_data_is_whole(live: bool) -> None:
    made = page("mine-1", hostile=HOSTILE)
    text = render(made, title=HOSTILE, live=live)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    policy = html.unescape(re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[0])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == ("'self'" if live else "'none'")
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    assert rules["script-src"].split() == [f"'sha256-{each}'" for each in digests]
    data = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[0]) == {"live": live, "page": json.loads(json.dumps(made))}
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text), "it loads nothing"


def test_data_holds_nothing_that_ends_or_begins_markup() -> None:
    text = embedded({"a": "<!--<script></script>&\u2028\u2029"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": "<!--<script></script>&\u2028\u2029"}
