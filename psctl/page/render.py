"""Makes the page: one HTML file that holds its styles, scripts and data, and loads nothing else.

The policy in it allows the two scripts and the styles by their hashes, so that text from other machines cannot run even
if it were taken for markup; the data is JSON in which no markup can begin or end.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources

import msgspec

from psctl.types import Document

ASSETS = "psctl.page"


def render(page: Document, *, title: str, live: bool) -> str:
    """Return the page as the text of an HTML file.

    Args:
        page: `jobs`, the documents of `JobHistory` by name, and `known`, the jobs that may be opened.
        title: the title of the window.
        live: whether the page asks its server for changes; else it is a file that stands alone.
    """
    style = _asset("uplot.css") + "\n" + _asset("page.css")
    scripts = [_asset("uplot.js"), _asset("page.js")]
    allowed = " ".join(_hash(each) for each in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style></head><body>",
        '<div id="page"><noscript>This page is drawn by a script; allow it to run.</noscript></div>',
        f'<script type="application/json" id="data">{embedded({"live": live, "page": page})}</script>',
        *(f"<script>{each}</script>" for each in scripts),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def embedded(document: Document) -> str:
    """Return JSON that can stand inside a script element: no `<`, `>` or `&`, and no line separators."""
    text = msgspec.json.encode(document).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files(ASSETS).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
