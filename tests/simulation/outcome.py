"""The result of one simulated run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.kernel import Violation


@dataclass
class Outcome:
    """The result of a seed."""

    seed: int
    invariant: str = ""  # name of the invariant that does not hold
    text: str = ""
    seconds: float = 0.0  # simulated
    event_count: int = 0
    values_checked: int = 0
    trace: list[str] = field(default_factory=list)


def outcome_of(seed: int, run: Callable[[], None]) -> Outcome:
    """Call `run`; a broken invariant and an exception of the product are both failures of the seed."""
    outcome = Outcome(seed)
    try:
        run()
    except Violation as error:
        outcome.invariant, outcome.text = error.invariant, str(error)
    except AssertionError as error:
        outcome.invariant, outcome.text = "assertion", "".join(traceback.format_exception(error)[-2:])
    except Exception as error:  # noqa: BLE001  any exception of the product is a failure
        outcome.invariant, outcome.text = "exception", "".join(traceback.format_exception(error)[-4:])
    return outcome
