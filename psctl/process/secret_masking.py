"""Replaces secrets in text: whole secrets, their lines, and the usual encodings of both.

Each line of a secret of several lines (a PEM key) is masked by itself too, because logs are read by lines. Parts
shorter than SHORTEST are not masked: they would match everywhere. The encodings are those in which libraries print a
value by mistake: JSON and Python literals, URLs, base64 (also inside other bytes, as in an Authorization header).
Only the standard library is imported here, because bootstrap.py masks secrets too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

HIDDEN = b"***"
"""The replacement of a secret."""

SHORT = 4
"""Characters below which a whole secret is not replaced."""

SHORTEST = 6
"""Characters below which a line of a secret, or an encoding of it, is not replaced by itself."""


class Secrets:
    """Masks secret values in all forms in which they may be written.

    Args:
        values: the secrets.
    """

    def __init__(self, values: Iterable[str]) -> None:
        found = {form for value in values if len(value) >= SHORT for form in _forms(value)}
        self._forms = sorted(found, key=len, reverse=True)  # whole secrets before their lines
        self.longest = max(map(len, found), default=0)

    def mask(self, data: bytes) -> bytes:
        """Return `data` with every secret replaced."""
        for form in self._forms:
            data = data.replace(form, HIDDEN)
        return data

    def mask_text(self, text: str) -> str:
        """Return `text` with every secret replaced."""
        return self.mask(text.encode("utf-8", "replace")).decode("utf-8", "replace") if self._forms else text


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
    """Yield a text as JSON (once and nested in JSON), Python and URLs write it."""
    found = {text, repr(text)[1:-1], repr(_bytes(text))[2:-1]}
    for ascii_only in (True, False):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        found |= {once, once.replace("/", "\\/"), json.dumps(once, ensure_ascii=ascii_only)[1:-1]}
    for safe in ("", "/"):
        found |= {quote(text, safe, errors="surrogateescape"), quote_plus(text, safe, errors="surrogateescape")}
    for form in found:
        yield _bytes(form)


def _coded(data: bytes) -> Iterator[bytes]:
    """Yield bytes as hexadecimal and base64 write them, also inside other bytes."""
    yield data.hex().encode()
    for before in range(3):
        first = -(-before * 8 // 6)  # the character before has bits of the preceding bytes
        last = (before + len(data)) * 8 // 6  # the character after has bits of the following bytes
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + data)[first:last]
    for line in base64.encodebytes(data).splitlines():
        yield line.rstrip(b"=")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
