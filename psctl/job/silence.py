"""How long the connections to the coordinator, and the agents, bear silence: longer than a short outage of a link."""

from __future__ import annotations

AGENT_PATIENCE = 15.0
"""Seconds for which an agent that cannot reach the coordinator keeps its processes; they may be replaced elsewhere."""

TOLERANCE = 30.0
"""Seconds of silence after which a connection to the coordinator ends; longer than AGENT_PATIENCE."""
