"""What SIGTERM is inside psctl."""

from __future__ import annotations


class Terminated(BaseException):
    """SIGTERM came: what must be put away is, on the way out."""
