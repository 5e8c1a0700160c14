"""Aligns the words of a table's rows with the devices of its columns, and reports words without a certain column."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import msgspec

from psctl.topology.findings import Finding, listed
from psctl.topology.readers.cells import CPU_LIST, UNAVAILABLE, is_tail, split_glued
from psctl.topology.readers.text_tables import TextRow, TextTable

MOST = 512
"""Rows or columns of one matrix; no host has more, and the time to read it grows with their square."""

AGAIN = "save the command's whole output again, to a file and not from a screen"


class AlignedRow(msgspec.Struct):
    """A row: its words by column, the values after them, and whether all its words are known."""

    label: str
    words: dict[int, str]
    tails: list[list[str]]  # the possible readings of the values after the words
    whole: bool = False


class AlignedTable(msgspec.Struct):
    """The contents of a table: its devices, a word a pair, the values after each row's words, and findings."""

    devices: tuple[str, ...]
    words: dict[tuple[str, str], str]
    tails: dict[str, list[list[str]]]
    findings: list[Finding]
    open_end: str = ""  # the device in whose row the text ends, without a line feed


def align(table: TextTable, known: re.Pattern[str]) -> AlignedTable:
    """Return the contents of a table. `known` matches the known words; unknown words are kept as printed."""
    findings: list[Finding] = []
    if (size := max(len(table.rows), len(table.devices))) > MOST:
        what = f"a matrix of {size:,} rows or columns is not read; at most {MOST} are"
        return AlignedTable((), {}, {}, [Finding(what, "save the output of one host")])
    columns = _columns(table, known, findings)
    devices = tuple(column for column in columns if column)
    place = {name: at for at, name in enumerate(columns) if name}
    rows = [_read(row, place.get(row.label), len(columns), _tailed(row, table), known) for row in table.rows]
    _by_columns(table, rows, place, len(columns))
    extra = _columnless(table, columns, known)
    words = _collect(table, rows, columns, known, findings)
    words |= {(label, column): word for label, row in extra.items() for column, word in row.items()}
    findings += _missing(table, rows, columns, words, extra)
    devices += tuple(extra)
    findings += _lopsided(devices, words)
    tails = {row.label: row.tails for row in reversed(rows) if row.tails and row.label in place}
    ends = next((row.label for row in table.rows if row.last), "")
    return AlignedTable(devices, words, tails, findings, ends)


def _columns(table: TextTable, known: re.Pattern[str], findings: list[Finding]) -> list[str]:
    """Return the device of each column, "" if unknown: that of the header, repaired by the column of each row's X."""
    header = list(table.devices)
    place = {name: at for at, name in enumerate(header)}
    seen: dict[int, set[str]] = {}
    longest = fitting = 0
    for row in table.rows:
        readings = [cells for cells, _ in row.tokens(known)]
        own = place.get(row.label)
        tailed = _tailed(row, table)
        fitting += own is not None and any(_is_whole(cells, own, len(header), known, tailed) for cells in readings)
        cells = min(map(_cells, readings), key=len)
        longest = max(longest, len(cells))
        if cells.count("X") == 1:
            seen.setdefault(cells.index("X"), set()).add(row.label)
    right = sum(seen.get(at) == {name} for at, name in enumerate(header))
    if header and (not seen or fitting * 2 > len(table.rows) or (right * 2 >= len(seen) and longest <= len(header))):
        return header
    columns = ["" for _ in range(longest)]
    names = [next(iter(labels)) for labels in seen.values() if len(labels) == 1]
    for at, labels in seen.items():
        if len(labels) == 1 and names.count(name := next(iter(labels))) == 1:
            columns[at] = name
    fits = [shift for shift in {0, longest - len(header)} if header and _fits(header, columns, shift)]
    if len(fits) == 1:
        for at, name in enumerate(header):
            columns[at + fits[0]] = name
    what = "has no header" if not header else f"has {longest} columns, but its header names {len(header)} devices"
    lost = columns.count("")
    rest = f"; {lost} columns belong to no known device and are left out" if lost else ""
    findings.append(Finding(f"the matrix {what}; its columns are named by the X of each row{rest}", AGAIN))
    return columns


def _fits(header: list[str], columns: list[str], shift: int) -> bool:
    """Return whether the header's names, shifted by a number of columns, agree with the rows' X."""
    if shift < 0 or shift + len(header) > len(columns):
        return False
    agree = [columns[at + shift] == name for at, name in enumerate(header) if columns[at + shift]]
    inside = set(columns[shift : shift + len(header)])
    return bool(agree) and all(agree) and not (set(header) & (set(columns) - inside))


def _tailed(row: TextRow, table: TextTable) -> int:
    """Return how many values may follow this row's words: one for each title, for GPUs only."""
    return len(table.tails) if row.label.startswith("GPU") else 0


def _cells(tokens: Sequence[str]) -> list[str]:
    """Return the tokens before the first number or word that no table has."""
    cells: list[str] = []
    for token in tokens:
        if CPU_LIST.fullmatch(token) or not (token.isupper() or token[0] == "<"):
            break
        cells.append(token)
    while cells and is_tail(cells[-1]):
        cells.pop()
    return cells


def _read(row: TextRow, own: int | None, width: int, tailed: int, known: re.Pattern[str]) -> AlignedRow:
    """Return a row's words: all if the row is complete, else those with a certain column on each side of its X."""
    wholes = []
    first: tuple[list[str], set[str]] | None = None
    for cells, doubtful in row.tokens(known):
        first = first or (cells, doubtful)
        if own is not None and _is_whole(cells, own, width, known, tailed):
            wholes.append((cells, doubtful))
    if wholes:
        clear = [reading for reading in wholes if all(map(is_tail, reading[0][width:]))]
        wholes = clear or wholes
        agreed = {
            at: word
            for at, word in enumerate(wholes[0][0][:width])
            if all(cells[at] == word and word not in doubtful for cells, doubtful in wholes)
        }
        tails = [cells[width:] for cells, doubtful in wholes if not doubtful & set(cells[width:])]
        return AlignedRow(row.label, agreed, tails, len(agreed) == width)
    if own is None or first is None:
        return AlignedRow(row.label, {}, [])
    return _part(row.label, *first, own, width, row.last or tailed > 0, known)


def _columnless(table: TextTable, columns: Sequence[str], known: re.Pattern[str]) -> dict[str, dict[str, str]]:
    """Return the words by column of each row without a column of its own: lines cut on the right lose columns of NICs.

    Such a row is certain if it occurs once and has exactly one word for each remaining column, none of them X.
    """
    labels = [row.label for row in table.rows]
    found: dict[str, dict[str, str]] = {}
    for row in table.rows:
        if row.label in columns or labels.count(row.label) > 1 or not all(columns):
            continue
        ways = [cells for cells, doubtful in row.tokens(known) if not doubtful]
        certain = [
            cells for cells in ways
            if len(cells) == len(columns) and "X" not in cells and all(map(known.fullmatch, cells))
        ]  # fmt: skip
        if len(ways) == len(certain) == 1 and (not row.last or _is_complete(certain[0][-1], known)):
            found[row.label] = dict(zip(columns, certain[0], strict=True))
    return found


def _is_whole(cells: list[str], own: int, width: int, known: re.Pattern[str], tailed: int) -> bool:
    """Return whether the cells are a complete row, with X in its own column; N/A is a word only before all values."""
    words, behind = cells[:width], cells[width:]
    if len(words) < width or words[own] != "X" or words.count("X") != 1 or (behind and known.fullmatch(behind[0])):
        return False
    if tailed and UNAVAILABLE.fullmatch(words[-1]) and sum(map(is_tail, behind)) < tailed:
        return False
    return not any(word[0] in "0123456789-," for word in words)


def _part(
    label: str, tokens: list[str], doubtful: set[str], own: int, width: int, open_: bool, known: re.Pattern[str]
) -> AlignedRow:
    """Return the words of an incomplete row that have a certain column.

    No word is missing left of X if X is in its own position; none is missing right of X if as many words follow as
    there are columns. Where the header has titles and a GPU's row ends without their values, the row was cut at its
    end: its words are the first ones, except the last word, which may be cut itself.
    """
    cells = _cells(tokens)
    words: dict[int, str] = {}
    crosses = [at for at, cell in enumerate(cells) if cell == "X"]
    cut = open_ and len(cells) == len(tokens) and len(cells) < width
    sound = [cell for cell in cells if known.fullmatch(cell)]
    if len(sound) == len(cells) and len(crosses) == 1 and len(cells) <= width:
        at = crosses[0]
        if at == own:
            words.update(enumerate(cells[: at + 1]))
        if len(cells) - at == width - own:
            words.update({width - len(cells) + place: cells[place] for place in range(at, len(cells))})
    if cut and (crosses == [own] or (not crosses and len(cells) <= own)):
        kept = cells[:-1] if cells and not _is_complete(cells[-1], known) else cells
        if all(known.fullmatch(cell) for cell in kept):
            words.update(enumerate(kept))
    tails = [tokens[len(cells) :]] if len(tokens) > len(cells) else []
    return AlignedRow(label, {at: word for at, word in words.items() if word not in doubtful}, tails)


def _is_complete(word: str, known: re.Pattern[str]) -> bool:
    """Return whether a word at the end of a cut text is complete; NV1 may be the beginning of NV18."""
    return bool(known.fullmatch(word)) and not word[-1].isdigit()


def _by_columns(table: TextTable, rows: list[AlignedRow], place: dict[str, int], width: int) -> None:
    """Align the words of incomplete rows by the positions of columns in complete rows.

    Lost text shifts the text after it to the left; only a word that reaches into the next column shifts text to the
    right. So in a row without such a word nothing is shifted if its X and its end (its last word, or the first value
    after the words) are in their positions; an empty cell is then a missing word.
    """
    if all(read.whole for read in rows):
        return
    for row, read in zip(table.rows, rows, strict=True):
        own = place.get(row.label)
        if read.whole or own is None or len(row.parts) > 1:
            continue
        begins = _measure(table, rows, width, row)
        words = _placed(row, begins, width) if begins else {}
        if words.get(own) == "X" and (width in words or (width - 1 in words and not row.last)):
            read.words = {at: word for at, word in words.items() if at < width}


def _placed(row: TextRow, begins: list[int], width: int) -> dict[int, str]:
    """Return a row's words, and the first value after them, by column; {} if one begins between columns."""
    words: dict[int, str] = {}
    for word, at in row.placed():
        centred = at - 1 if word == "X" and at not in begins else at
        if centred not in begins:
            return {}
        column = begins.index(centred)
        if column == width:
            words[column] = word
            break
        if is_tail(word) or (column + 1 < len(begins) and at + len(word) >= begins[column + 1]):
            return {}
        words[column] = word
    return words


def _measure(table: TextTable, rows: list[AlignedRow], width: int, like: TextRow) -> list[int]:
    """Return the position of each column, and of the values after the words if there are any; [] if rows differ.

    X is centred and ignored. Only complete rows count whose names span as many tab stops, because a longer name shifts
    the row.
    """
    seen: list[set[int]] = [set() for _ in range(width + 1)]
    for row, read in zip(table.rows, rows, strict=True):
        if not read.whole or len(row.parts) > 1 or len(row.label) // 8 != len(like.label) // 8:
            continue
        placed = row.placed()
        if [word for word, _ in placed[:width]] != list(read.words.values()):
            continue
        for column, (word, at) in enumerate(placed[: width + 1]):
            if word != "X":
                seen[column].add(at)
    if not seen[-1]:
        seen.pop()
    return [min(begin) for begin in seen] if all(len(begin) == 1 for begin in seen) else []


def _cut_word(row: TextRow, read: AlignedRow, known: re.Pattern[str]) -> int | None:
    """Return the column of the word in which the text ends, if it may be the beginning of a longer word."""
    tokens = " ".join(row.parts).split()
    split = split_glued(tokens[-1], known)[0] if tokens else []
    if not row.last or not split or _is_complete(split[-1], known) or is_tail(split[-1]):
        return None
    return max((at for at, word in read.words.items() if word == split[-1]), default=None)


def _collect(
    table: TextTable, rows: list[AlignedRow], columns: list[str], known: re.Pattern[str], findings: list[Finding]
) -> dict[tuple[str, str], str]:
    """Return the words by pair; a pair for which two rows differ has none."""
    words: dict[tuple[str, str], str] = {}
    torn: set[tuple[str, str]] = set()
    cuts: list[tuple[str, str]] = []
    for row, read in zip(table.rows, rows, strict=True):
        cut = _cut_word(row, read, known)
        for at, word in read.words.items():
            pair = (read.label, columns[at])
            if word == "X" or not columns[at]:
                continue
            if words.setdefault(pair, word) != word:
                torn.add(pair)
            if at == cut:
                cuts.append(pair)
    for label, other in cuts:
        if words.get((other, label)) != words[label, other]:
            del words[label, other]
            what = f"the text ends within the row of {label}: its word for {other} may be cut and is left out"
            findings.append(Finding(what, AGAIN))
    for pair in torn:
        words.pop(pair, None)
    if torn:
        labels = listed(dict.fromkeys(label for label, _ in sorted(torn)))
        findings.append(
            Finding(f"the matrix has two rows that differ for {labels}; the cells that differ are left out", AGAIN)
        )
    return words


def _missing(
    table: TextTable,
    rows: list[AlignedRow],
    columns: list[str],
    grid: dict[tuple[str, str], str],
    extra: Collection[str],
) -> list[Finding]:
    """Return the findings on rows that are missing, belong to no column, or have lost words.

    `extra` are the rows that were read although their own columns are missing.
    """
    findings = []
    present = {read.label for read in rows}
    absent = [name for name in columns if name and name not in present]
    if absent:
        unknown = [(a, b) for a in absent for b in absent if a < b]
        links = "; the links between them are unknown" if unknown else ""
        findings.append(Finding(f"the matrix has no row for {listed(absent)}{links}", AGAIN))
    if extra:
        what = f"the matrix has no column for {listed(extra)}: the links between them are unknown"
        findings.append(Finding(what, AGAIN))
    strangers = [read.label for read in rows if read.label not in columns and read.label not in extra]
    if strangers:
        what = f"the rows of {listed(strangers)} belong to no column of the matrix and are left out"
        findings.append(Finding(what, AGAIN))
    for row, read in zip(table.rows, rows, strict=True):
        others = [name for name in columns if name and name != read.label]
        lost = [name for name in others if (read.label, name) not in grid]
        if lost and not read.whole and read.label in columns:
            none = "" if len(lost) < len(others) else "; none of its words can be aligned"
            end = "; the text ends in it" if row.last else ""
            what = f"the row of {read.label} is incomplete: no word for {listed(lost)}{none}{end}"
            findings.append(Finding(what, AGAIN))
    return findings


def _lopsided(devices: Sequence[str], words: dict[tuple[str, str], str]) -> list[Finding]:
    """Return a finding for pairs whose two cells differ."""
    pairs = []
    for at, a in enumerate(devices):
        for b in devices[at + 1 :]:
            one, other = words.get((a, b)), words.get((b, a))
            if one and other and one != other:
                pairs.append(f"{a} to {b} is {one}, back it is {other}")
    what = f"the matrix contradicts itself: {listed(pairs, 4)}"
    cure = "run the command again and compare: both directions of a pair must be equal"
    return [Finding(what, cure)] if pairs else []
