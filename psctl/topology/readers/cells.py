"""Cleans the text of tables and splits it into cells.

A table of nvidia-smi is words between tabs. Saved tables are often damaged: tabs become blanks or vanish (two cells are
joined), a terminal breaks lines at its width (even inside a word), escape sequences lose their first byte. These
functions repair one token at a time; where two readings are possible, both are returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

LINK_WORDS = re.compile(r"SYS|NODE|PHB|PXB|PIX|SOC|NV\d{1,3}|X")
"""The link types of `nvidia-smi topo -m`. No word consists of others, so joined words split in only one way."""

PEER_WORDS = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U|X")
"""The codes of `nvidia-smi topo -p2p`."""

GPU = re.compile(r"GPU\d+(?:/[A-Za-z]+\d+)*")
DEVICE = re.compile(
    r"GPU\d+(?:/(?:GI|CI)\d+)*|GPU\d+(?:/[A-Za-z]+\d+)+|NIC\d+|mlx\d+_(?:[a-z]+_?)?\d+|[a-z][\w.:-]*\d[\w.-]*"
)
"""The name of a device in a header: GPU0, GPU0/GI1, NIC0, mlx5_0, mlx5_bond_0; others in lower case with a number."""

CPU_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*,?")
UNAVAILABLE = re.compile(r"N/A|n/a")

_ESCAPES = re.compile(
    r"(?:\ufffd|\\u001[bB]|\\x1[bB]|\\033|\\e)?\[\d+(?:;\d+)*m"
    r"|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]"
)
_INVISIBLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b-\u200f\u2060\ufeff\ufffd]")
_BLANKS = re.compile(r"[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_BARS = re.compile(r"[|\u2502\u2503\u2551]")


def clean(text: str) -> str:
    """Return the text without escape sequences, special blanks and invisible characters, with line feeds as line ends.

    Bars of a drawn table become tabs. In a text that was stored as one quoted string, \\t and \\n become tabs and line
    feeds.
    """
    if "\n" not in text.strip() and "\\n" in text:
        text = text.replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _ESCAPES.sub("", text)
    if not text.isascii():
        text = _INVISIBLE.sub("", _BLANKS.sub(" ", text))
    elif not text.isprintable():
        text = _INVISIBLE.sub("", text)
    return _BARS.sub("\t", text).replace("**", "")


def split_glued(token: str, words: re.Pattern[str]) -> tuple[list[str], bool]:
    """Return the cells in a token, and whether the split is certain.

    A single word, known or not, is one cell. Joined known words are split. A word joined to a list of processors is
    split too; after NVn the digits could belong to either, so the split is uncertain.
    """
    if words.fullmatch(token) or not token[0].isalpha():
        return [token], True
    cells, at = [], 0
    while match := words.match(token, at):
        cells.append(match[0])
        at = match.end()
    if at == len(token):
        return cells, True
    if cells and CPU_LIST.fullmatch(token, at):
        return [*cells, token[at:]], not cells[-1][-1].isdigit()
    if len(cells) and cells[-1][:2] == "NV" and token[at] in "-,":
        return [token], False
    return [token], True


def is_tail(token: str) -> bool:
    """Return whether a token is an affinity value: a list of processors, a NUMA node, or N/A."""
    return bool(CPU_LIST.fullmatch(token) or UNAVAILABLE.fullmatch(token))


def possible_joins(before: str, after: str, words: re.Pattern[str]) -> tuple[str, ...]:
    """Return the possible texts at a line break before the terminal broke the line: a blank, nothing, or either.

    `before` and `after` are the lines on both sides. A blank next to the break decides; so do halves that form a word
    only together. Between two numbers both are possible.
    """
    if not before or before[-1].isspace() or not after or after[0].isspace():
        return (" ",)
    left, right = before.split()[-1], after.split()[0]
    whole = left + right
    if words.fullmatch(left) and words.fullmatch(right):
        return (" ",)
    if words.fullmatch(whole) or whole in ("N/A", "n/a"):
        return ("",)
    if is_tail(right) and not is_tail(left) and left[-1] not in ",-":
        return (" ",)
    return (" ", "") if _fragment(left) and _fragment(right) else (" ",)


def _fragment(token: str) -> bool:
    """Return whether a token may be half of a list of processors ("0-23,") or of an unknown word."""
    return bool(re.fullmatch(r"[A-Z0-9<>/?,-]+|<?\w+>?", token))


def ranges(cpus: str) -> list[tuple[int, int]] | None:
    """Return a list of processors as (first, last) ranges; None if it does not ascend, and so is no such list."""
    found: list[tuple[int, int]] = []
    for part in cpus.rstrip(",").split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        pair = (int(first), int(last or first))
        if pair[0] > pair[1] or (found and pair[0] <= found[-1][1]):
            return None
        found.append(pair)
    return found


def unglue_node(token: str) -> list[tuple[str, str]]:
    """Return each way to split a list of processors from the NUMA node joined to its end.

    The list must ascend; a node's number has no leading zero and is at most the last processor's, because each node
    before it has a processor too. "64-950" can only be 64-95 and node 0.
    """
    ways = []
    for cut in range(1, len(token)):
        cpus, node = token[:-cut], token[-cut:]
        if not node.isdigit() or not cpus[-1].isdigit():
            break
        if node[0] == "0" and len(node) > 1:
            continue
        listed = ranges(cpus)
        if listed and int(node) <= listed[-1][1]:
            ways.append((cpus, node))
    return ways


class PlacedToken(msgspec.Struct, frozen=True):
    """A token of a line and the column at which it begins on a terminal."""

    word: str
    at: int


def placed_tokens(line: str) -> Iterator[PlacedToken]:
    """Yield the tokens of a line with their columns; tabs reach to the next multiple of 8."""
    for match in re.finditer(r"\S+", line.expandtabs(8)):
        yield PlacedToken(match[0], match.start())
