"""Finds the tables of a text: a header that names devices, and rows that begin with a device.

The diagonal verifies a row: a row is complete if it has as many words as the header has devices, and X in its own
column. Of an incomplete row, only the cells whose column X or the alignment determines are kept; the others are left
out and reported. A header that lost a name is repaired by the rows' X in the same way (`column_alignment`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from psctl.topology.readers.cells import CPU_LIST, DEVICE, GPU, placed_tokens, possible_joins, split_glued

_TAILS = (
    (re.compile(r"GPU\s*NUMA\s*ID"), "gpu_numa"),
    (re.compile(r"CPU\s*Affinity"), "cpus"),
    (re.compile(r"NUMA\s*Affinity"), "numa"),
)
_TITLES = frozenset({"CPU", "NUMA", "Affinity", "GPU", "ID"})
_FIRM = re.compile(r"GPU\d+(?:/[A-Za-z]+\d+)*|NIC\d+|mlx\d+_\w+")
_MOST_HEADER = 32  # lines that a terminal makes of one header
_MOST_BREAKS = 6  # of one row; more are read as blanks


class TextRow:
    """An unparsed row: its name, and the text after it, one part for each line into which a terminal broke it."""

    def __init__(self, label: str, source: str, start: int, stop: int, last: bool) -> None:
        self.label = label
        self.source = source[:stop]
        self.start = start  # where the text after the name begins
        self.parts = [source[start:stop]]
        self.last = last  # the text ends here, without a line feed

    def placed(self) -> list[tuple[str, int]]:
        """Return the tokens after the name on the row's first line, and the column at which each begins."""
        begin = len(self.source[: self.start].expandtabs(8))
        return [(piece.word, piece.at) for piece in placed_tokens(self.source) if piece.at >= begin]

    def tokens(self, words: re.Pattern[str]) -> Iterator[tuple[list[str], set[str]]]:
        """Yield each possible reading of the row: its cells, and those of tokens whose split is uncertain."""
        breaks = [possible_joins(a, b, words) for a, b in itertools.pairwise(self.parts)]
        if self.last:  # the text may be cut after the break
            breaks[-1:] = [ways[:1] for ways in breaks[-1:]]
        if sum(len(ways) > 1 for ways in breaks) > _MOST_BREAKS:
            breaks = [ways[:1] for ways in breaks]
        for ways in itertools.product(*breaks):
            text = self.parts[0] + "".join(way + part for way, part in zip(ways, self.parts[1:], strict=True))
            cells: list[str] = []
            doubtful: set[str] = set()
            for token in text.split():
                split, certain = split_glued(token, words)
                cells += split
                if not certain:
                    doubtful.update(split)
            yield cells, doubtful


class TextTable:
    """A header's devices and titles, the rows below it, and the lines after them up to the next table."""

    def __init__(self, header: list[str]) -> None:
        self.header = header
        self.rows: list[TextRow] = []
        self.after: list[str] = []
        self.devices: tuple[str, ...] = ()  # of the header
        self.tails: tuple[str, ...] = ()

    def words(self) -> set[str]:
        """Return all tokens of the rows except X."""
        return {token for row in self.rows for part in row.parts for token in part.split()} - {"X"}

    def has_cross(self) -> bool:
        """Return whether any row contains X, as only rows of matrices do."""
        return any("X" in part.split() for row in self.rows for part in row.parts)

    def of_peers(self) -> bool:
        """Return whether the table has the legend of peer codes."""
        return any("Status Ok" in line for line in self.after)


def tables(text: str, words: re.Pattern[str]) -> list[TextTable]:
    """Return the tables of a cleaned text, in order; `words` matches the cells of a row."""
    found = _Scan(words).run(text)
    for table in found:
        labels = {row.label for row in table.rows}
        table.devices, table.tails = _names(_joined(table.header, labels), labels)
    return found


class _Scan:
    """Classifies the lines in one pass: a header, a row, the continuation of a broken line, or other text."""

    def __init__(self, words: re.Pattern[str]) -> None:
        self.words = words
        self.label = re.compile(rf"(?<!\S)({DEVICE.pattern})(?=[ \t]+(?:(?:{words.pattern})+(?:\d[\d,-]*)?(?:\s|$)|<))")
        self.found: list[TextTable] = []
        self.header: list[str] = []
        self.open = ""  # kind of the line before: "header", "row", "gap" (blank lines after a row) or ""

    def run(self, text: str) -> list[TextTable]:
        lines = text.split("\n")
        for number, line in enumerate(lines):
            last = number == len(lines) - 1
            if not line.strip():
                self.open = "gap" if self.open == "row" else self.open
            elif labels := self._labels(line):
                self._rows(line, labels, last)
            else:
                self._other(line, last)
        if self.header and not self.found:
            self.found.append(TextTable(self.header))
        return self.found

    def _labels(self, line: str) -> list[tuple[int, int, str]]:
        """Return the names of the rows that begin in a line: start, end and name of each."""
        header = self.header or (self.found[-1].header if self.found else [])
        found = [(m.start(1), m.end(1), m[1]) for m in self.label.finditer(line)]
        if not all(_FIRM.fullmatch(name) for _, _, name in found) and header:
            text = "".join("".join(header).split())
            found = [row for row in found if _FIRM.fullmatch(row[2]) or row[2] in text]
        if found:
            return found
        known = _known(header)
        tokens = list(re.finditer(r"\S+", line))
        for at, token in enumerate(tokens[:-1]):
            if token[0] in known or GPU.fullmatch(token[0]):
                others = [other[0] for other in tokens[at + 1 :]]
                cells = any(map(self.words.fullmatch, others)) and not any(map(GPU.match, others))
                names = any(DEVICE.fullmatch(other[0]) for other in tokens[:at])  # the end of a broken header
                return [(token.start(), token.end(), token[0])] if cells or (_maybe_words(others) and not names) else []
        return []

    def _rows(self, line: str, labels: list[tuple[int, int, str]], last: bool) -> None:
        lead = line[: labels[0][0]]
        if any(GPU.fullmatch(token) for token in _marked(lead)):
            self.header = [lead]
        for number, (_, end, label) in enumerate(labels):
            self._table(label)
            stop = labels[number + 1][0] if number + 1 < len(labels) else len(line)
            if (legend := line.find("Legend:", end, stop)) >= 0:  # the text has lost its line feeds
                self.found[-1].after.append(line[legend:])
                stop = legend
            self.found[-1].rows.append(TextRow(label, line, end, stop, last and stop == len(line)))
        self.open = "row"

    def _table(self, label: str) -> None:
        """Begin a table if there is a header before this row that does not repeat the table's header."""
        if self.header:
            here = self.found[-1] if self.found else None
            again = here and [line.split() for line in here.header] == [line.split() for line in self.header]
            if not (here and again and label not in {row.label for row in here.rows}):
                self.found.append(TextTable(self.header))
            self.header = []
        elif not self.found:
            self.found.append(TextTable([]))

    def _other(self, line: str, last: bool) -> None:
        if self.open == "header" and len(self.header) < _MOST_HEADER and _is_fragment(self.header, line):
            self.header.append(line)
        elif _is_header(line) or (not self.found and GPU.fullmatch(line.split()[-1])):
            self.header, self.open = [line], "header"
        elif self.open in ("row", "gap") and self._continues(line, last):
            row = self.found[-1].rows[-1]
            row.parts.append(line)
            row.last = last
        else:
            self.open = ""
            if self.found:
                self.found[-1].after.append(line)

    def _continues(self, line: str, last: bool) -> bool:
        """Return whether a line continues the row above, which a terminal broke."""
        row = self.found[-1].rows[-1]
        tokens = line.split()
        if (
            last
            and len(tokens) == 1
            and any(name.startswith(tokens[0]) for name in " ".join(self.found[-1].header).split())
        ):
            return False  # the text is cut within a name
        inner = tokens if possible_joins(row.parts[-1], line, self.words) == (" ",) else tokens[1:]
        if any(self._is_cell(token) for token in tokens):
            return all(self._is_cell(token) or _maybe_words([token]) for token in inner[:-1] or inner)
        return self.open == "row" and all(_is_tail_part(token) or _maybe_words([token]) for token in inner)

    def _is_cell(self, token: str) -> bool:
        return all(self.words.fullmatch(cell) for cell in split_glued(token, self.words)[0])


def _maybe_words(tokens: list[str]) -> bool:
    """Return whether tokens may be unknown words of a matrix: capitals or angle brackets, and no device."""
    return all(re.fullmatch(r"[A-Z0-9<>/?,-]+|<\w+>?", token) and not _is_name(token) for token in tokens)


def _is_tail_part(token: str) -> bool:
    return bool(CPU_LIST.fullmatch(token) or re.fullmatch(r"N/A|n/a|N/|/?A|[\d,-]+", token))


def _marked(line: str) -> list[str]:
    """Return the tokens of a header, each title as one token."""
    for pattern, name in _TAILS:
        line = pattern.sub(f" \x01{name} ", line)
    tokens: list[str] = []
    for token in line.split():
        glued = [match[0] for match in DEVICE.finditer(token)]
        tokens += glued if "".join(glued) == token else [token]
    return tokens


def _is_name(token: str) -> bool:
    return token[0] == "\x01" or bool(DEVICE.fullmatch(token))


def _is_header(line: str) -> bool:
    tokens = _marked(line)
    named = [token for token in tokens if _is_name(token)]
    gpus = any(GPU.fullmatch(token) for token in named)
    return gpus and (len(named) == len(tokens) or len(named) >= 2)


def _is_fragment(header: list[str], line: str) -> bool:
    """Return whether a line continues a broken header: together they consist of names, and half a name at the end."""
    joined = _joined([*header, line], set())
    return bool(re.match(r"\s*[\w/]", line)) and _unknown_count(joined) <= _unknown_count(header[0])


def _unknown_count(line: str) -> int:
    """Return how many tokens of a header are not names, except up to three at its end, of a broken title."""
    tokens = _marked(line)
    while tokens and len(tokens) > len(_marked(line)) - 3 and not _is_name(tokens[-1]):
        tokens.pop()
    return sum(not _is_name(token) for token in tokens)


def _joined(lines: Sequence[str], labels: set[str]) -> str:
    """Return a header that a terminal broke, as one line."""
    text = ""
    for line in lines:
        if text and not text[-1].isspace() and not line[0].isspace():
            left, right = text.split()[-1], line.split()[0]
            whole = left + right in labels and not {left, right} <= labels
            text += "" if whole or not (_fits(left) and _fits(right)) else " "
        elif text:
            text += " "
        text += line
    return text


def _known(header: list[str]) -> set[str]:
    """Return the possible names in a broken header, without halves of names (bnxt_re) or titles (C)."""
    names: set[str] = set()
    for text in (" ".join(header), "".join(header)):
        names.update(itertools.dropwhile(lambda token: not GPU.match(token), text.split()))
    for left, right in itertools.pairwise(line.split() for line in header):
        if left and right and _fits(left[-1] + right[0]) and not (_fits(left[-1]) and _fits(right[0])):
            names -= {left[-1], right[0]}
    return (names | {token for token in _joined(header, set()).split() if DEVICE.fullmatch(token)}) - _TITLES


def _fits(token: str) -> bool:
    return token in _TITLES or bool(DEVICE.fullmatch(token))


def _names(header: str, labels: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the devices and the titles in the longest run of names of a header."""
    best: list[str] = []
    run: list[str] = []
    for token in [*_marked(header), ""]:
        if token and (_is_name(token) or token in labels):
            run.append(token)
            continue
        if len(run) > len(best) and any(GPU.fullmatch(one) for one in run):
            best = run
        run = []
    devices = dict.fromkeys(token for token in best if token[0] != "\x01")
    return tuple(devices), tuple(token[1:] for token in best if token[0] == "\x01")
