"""What must not be seen is replaced wherever it is written: secrets, their lines, and the usual encodings of both.

Of a secret of several lines (a PEM key) each line counts by itself too, for logs are taken line by line. Parts shorter
than SHORTEST are left alone: they would match everywhere. The encodings are those in which libraries print a value by
mistake: JSON and Python literals, URLs, base64 (also in the middle of other bytes, as in an Authorization header).
Only the standard library is imported here, for bootstrap.py masks too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

HIDDEN = b"***"
"""What stands in place of a secret."""

SHORT = 4
"""Characters below which a whole secret is not replaced."""

SHORTEST = 6
"""Characters below which a line of a secret, or an encoding of it, is not replaced by itself."""


class Secrets:
    """The values that must not be seen, in all forms in which they may be written.

    Args:
        values: the secrets.
    """

    def __init__(self, values: Iterable[str]) -> None:
        found = {form for value in values if len(value) >= SHORT for form in _forms(value)}
        self._forms = sorted(found, key=len, reverse=True)  # a line must not break up the whole before it was found
        self.longest = max(map(len, found), default=0)

    def strike(self, data: bytes) -> bytes:
        """Return `data` without any secret."""
        for form in self._forms:
            data = data.replace(form, HIDDEN)
        return data

    def strike_text(self, text: str) -> str:
        """Return `text` without any secret."""
        return self.strike(text.encode("utf-8", "replace")).decode("utf-8", "replace") if self._forms else text


def _forms(value: str) -> Iterator[bytes]:
    yield _bytes(value)
    for line in value.splitlines():
        if len(line.strip()) >= SHORTEST:
            yield from _literals(line.strip())
    whole = value.strip()
    if len(whole) >= SHORTEST:
        yield from (form for form in (*_literals(value), *_literals(whole)) if len(form) >= SHORTEST)
        yield from (form for form in (*_coded(_bytes(value)), *_coded(_bytes(whole))) if len(form) >= SHORTEST)


def _literals(text: str) -> Iterator[bytes]:
    """Yield how JSON (once and within JSON), Python and URLs write a text."""
    found = {text, repr(text)[1:-1], repr(_bytes(text))[2:-1]}
    for ascii_only in (True, False):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        found |= {once, once.replace("/", "\\/"), json.dumps(once, ensure_ascii=ascii_only)[1:-1]}
    for safe in ("", "/"):
        found |= {quote(text, safe, errors="surrogateescape"), quote_plus(text, safe, errors="surrogateescape")}
    for form in found:
        yield _bytes(form)


def _coded(data: bytes) -> Iterator[bytes]:
    """Yield how bytes look in hexadecimal and in base64, also where they stand in the middle of other bytes."""
    yield data.hex().encode()
    for before in range(3):
        first = -(-before * 8 // 6)  # the character before holds bits of what stands in front
        last = (before + len(data)) * 8 // 6  # the one behind holds bits of what follows
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + data)[first:last]
    for line in base64.encodebytes(data).splitlines():
        yield line.rstrip(b"=")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
