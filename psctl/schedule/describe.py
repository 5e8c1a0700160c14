"""A schedule as text: the messages of each step, and a line that sums it up."""

from __future__ import annotations

from psctl.schedule.groups import spans
from psctl.schedule.schedule import Schedule, ScheduleMessage


def lines(schedule: Schedule, limit: int | None = None) -> list[str]:
    """Return one line a message: step, sender, receiver, chunks, and whether they are added or copied there.

    Args:
        schedule: the schedule.
        limit: largest number of messages; a last line has the number of the others.
    """
    messages = schedule.messages()
    shown = messages if limit is None else messages[:limit]
    wide, names = len(str(max(schedule.steps - 1, 0))), [_node_name(schedule, node) for node in range(schedule.nodes)]
    width = max(map(len, names))
    found = [
        f"step {one.step:>{wide}}  {names[one.source]:>{width}} -> {names[one.destination]:<{width}}  {_action(one)}"
        for one in shown
    ]
    return found if len(shown) == len(messages) else [*found, f"and {len(messages) - len(shown)} more"]


def summary(schedule: Schedule) -> str:
    """Return the schedule in one line: steps, messages, and the bytes that the busiest rank sends."""
    most = max(schedule.sent(1.0)[: schedule.world])
    helpers = schedule.nodes - schedule.world
    nodes = f"{schedule.world} ranks" + (f" and {helpers} helpers" if helpers else "")
    counts = f"{schedule.steps} steps, {len(schedule.messages())} messages"
    name = f"{schedule.name}: {schedule.collective}"
    return f"{name} among {nodes} in {counts}, at most {most:.3g} of the vector out of a rank"


def _node_name(schedule: Schedule, node: int) -> str:
    """Return the name of a node for people: a rank, or a helper, both counted from 0."""
    return f"rank {node}" if node < schedule.world else f"helper {node - schedule.world}"


def _action(message: ScheduleMessage) -> str:
    verb = "add" if message.action == "reduce" else "copy"
    return f"{verb} {'chunk' if len(message.chunks) == 1 else 'chunks'} {spans(message.chunks)}"
