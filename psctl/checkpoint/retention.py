"""Which checkpoints to keep: the newest ones, and the best one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Metrics = Mapping[str, float | None]


def best(checkpoints: Iterable[tuple[int, Metrics]], metric: str, mode: str) -> int | None:
    """Return the step whose metric is smallest (mode "min") or largest ("max"); of equals the newest.

    Those without that metric, or where it was no finite number, do not compete; None when none does.
    """
    sign = -1.0 if mode == "min" else 1.0
    values = [(sign * value, step) for step, metrics in checkpoints if (value := metrics.get(metric)) is not None]
    return max(values)[1] if values else None


def steps_to_remove(
    checkpoints: Sequence[tuple[int, Metrics]], keep: int, keep_best: tuple[str, str] | None, protect: int | None = None
) -> list[int]:
    """Return the steps to remove, oldest first.

    Args:
        checkpoints: (step, metrics) of the whole ones.
        keep: how many of the newest stay; at least 1 always does.
        keep_best: (metric, "min" | "max"): the best one stays beside them.
        protect: a step that stays too (what the job resumed from).
    """
    stay = set(sorted(step for step, _ in checkpoints)[-max(1, keep) :])
    if keep_best is not None:
        winner = best(checkpoints, *keep_best)
        stay |= set() if winner is None else {winner}
    if protect is not None:
        stay.add(protect)
    return sorted(step for step, _ in checkpoints if step not in stay)
