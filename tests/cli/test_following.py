"""Following a job while this machine refuses something: the job continues, and the user learns how to come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from psctl.cli.shared import following
from psctl.cli.shared.context import Context
from psctl.cli.shared.following import JobFollower, SignalQueue
from psctl.cli.shared.global_options import GlobalOptions
from tests.launch.test_home import record


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("can't start new thread"), True), (OSError("no"), True), (BrokenPipeError(), False)],
)
def test_an_error_of_this_machine_says_that_the_job_continues(
    error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FailingReader:
        def __init__(self, *_: Any) -> None:
            pass

        def events(self) -> Iterator[None]:
            yield None
            raise error

    monkeypatch.setattr(following, "EventReader", FailingReader)
    follower = JobFollower(Context(GlobalOptions(), {}, []), record("digits-1", 1.0), SignalQueue(), None, None, True)
    with pytest.raises(type(error)):
        follower.run()
    said = capsys.readouterr().err
    assert ("digits-1 is not followed any more, but continues" in said) is told
    assert ("psctl attach digits-1" in said) is told
