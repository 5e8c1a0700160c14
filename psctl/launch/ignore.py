"""Rules of .gitignore files, as git reads them: which files of a folder are left out of its archive.

A rule is a pattern with its base folder. The last rule that matches a path decides; a rule that starts with "!"
includes the path again, except within a folder that is left out. A pattern with a slash at its start or in its middle
is relative to its base; one without matches at any depth. A slash at the end means folders only.

The library pathspec is not used: it matches what lies below a matching folder too, and so differs from git in 4 of 100
random sets of patterns (`?/**/`; `/[!a]/*` followed by `![!a]/`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

ALWAYS = (".git", "__pycache__/", "*.pyc", ".psctl/")
"""Patterns that are always left out: such files are of no use on another host."""


class Rule(msgspec.Struct, frozen=True):
    """One line of a .gitignore. `base` is its folder, relative, "" or ending in a slash."""

    base: str
    pattern: str  # regular expression over the path below `base`
    folders_only: bool
    negated: bool

    def matches(self, path: str, folder: bool) -> bool:
        """Return whether the rule matches `path` (relative, "/"-separated)."""
        if (self.folders_only and not folder) or not path.startswith(self.base):
            return False
        return re.fullmatch(self.pattern, path[len(self.base) :]) is not None


def parse(text: str, base: str = "") -> list[Rule]:
    """Read the rules of a .gitignore that lies in `base` ("" or "folder/")."""
    return [rule for line in text.splitlines() if (rule := _rule(line, base)) is not None]


def is_left_out(path: str, folder: bool, rules: Iterable[Rule]) -> bool:
    """Return whether `path` is left out; its parent folders are not."""
    out = False
    for rule in rules:
        if rule.negated == out and rule.matches(path, folder):
            out = not rule.negated
    return out


def _rule(line: str, base: str) -> Rule | None:
    line = re.sub(r"(?<!\\)\s+$", "", line)
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    folders_only = line.endswith("/")
    line = line.rstrip("/")
    if not line:
        return None
    tied = "/" in line
    expression = _translate(line.removeprefix("/"))
    return Rule(base, expression if tied else rf"(?:.*/)?{expression}", folders_only, negated)


def _translate(pattern: str) -> str:
    """Turn one pattern into a regular expression: `*` and `?` stop at slashes, `**` does not."""
    out, at = [], 0
    while at < len(pattern):
        if pattern.startswith("**/", at) and (at == 0 or pattern[at - 1] == "/"):
            out.append(r"(?:.*/)?")
            at += 3
        elif pattern[at:] == "**" and (at == 0 or pattern[at - 1] == "/"):
            out.append(r".*")
            at += 2
        elif pattern[at] == "*":
            out.append(r"[^/]*")
            at += 2 if pattern.startswith("**", at) else 1
        elif pattern[at] == "?":
            out.append(r"[^/]")
            at += 1
        elif pattern[at] == "[" and (match := re.match(r"\[([!^]?)(\]?[^\]]*)\]", pattern[at:])):
            body = match[2].replace("\\", "\\\\").replace("[", "\\[")
            out.append(f"(?!/)[{'^' if match[1] else ''}{body}]")
            at += match.end()
        elif pattern[at] == "\\" and at + 1 < len(pattern):
            out.append(re.escape(pattern[at + 1]))
            at += 2
        else:
            out.append(re.escape(pattern[at]))
            at += 1
    return "".join(out)
