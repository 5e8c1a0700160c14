"""Profiles some steps of a worker by torch.profiler when its agent requests it, and writes the result."""

from __future__ import annotations

import os
import sys

import torch

from psctl.process.step_ring import StepRecorder

ROWS = 15
"""Operators in the table, those with most time of their own first."""


class StepProfiler:
    """Starts after the step in which a request is seen, and writes after as many steps as were requested.

    Args:
        recorder: passes the agent's requests.
        path: where the trace is written, for chrome://tracing or Perfetto; the table beside it with .txt in place of
            .json, before the trace.
    """

    def __init__(self, recorder: StepRecorder, path: str) -> None:
        self._recorder, self._path = recorder, path
        self._ticket = 0  # of the last request that was begun: one may have come before the script called init
        self._left = 0
        self._profile: torch.profiler.profile | None = None

    def after_step(self) -> None:
        """Start, go on or end; called after every step."""
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._end()
            return
        request = self._recorder.profile_request
        if request.ticket != self._ticket and request.steps and self._path:
            self._ticket, self._left = request.ticket, request.steps
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None, "it was started"
        profile.stop()
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=40)
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            with open(self._path.removesuffix(".json") + ".txt", "w", encoding="utf-8") as file:
                file.write(table)
            profile.export_chrome_trace(self._path + ".part")
            os.replace(self._path + ".part", self._path)
        except (OSError, RuntimeError) as error:  # training goes on; psctl profile says where to look
            print(f"psctl: the profile was not written: {error}", file=sys.stderr, flush=True)
