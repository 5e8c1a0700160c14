"""Messages between the coordinator and readers: processes of groups that read the job's servers (`groups:`).

A reader joins (Join) and receives the Decision of the job, and Reassign and TablesAt at each change of the servers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from psctl import types
from psctl.job.message import JobMessage

MOST_NUMBERS = 1000
"""Numbers that one report may have."""


class GroupReport(JobMessage, frozen=True):
    """A reader to the coordinator: numbers that its script reports, for the step whose values it read."""

    step: types.Step
    metrics: Annotated[dict[types.Name, float], msgspec.Meta(max_length=MOST_NUMBERS)]


class TrainingEnded(JobMessage, frozen=True):
    """The coordinator to a reader: the workers have ended; the servers have the last values, for a minute at most."""
