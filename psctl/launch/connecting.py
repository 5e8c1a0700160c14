"""How rooms of launch get connections: handed in from outside, so that options and tests decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psctl.launch.clusters import ChosenCluster
from psctl.remote.fleet import Fleet

Connect = Callable[[ChosenCluster, Sequence[str] | None], Fleet]
"""Connects to a cluster's hosts, all or these."""
