"""SIGTERM as an exception."""

from __future__ import annotations


class Terminated(BaseException):
    """Raised by SIGTERM, so that open contexts are cleaned up."""
