"""The shards that step in backward (messages.StepInBackward), by the server that leads them.

They are a part of those that each server leads, as far apart as possible, since values that are there already give
those between them time; those of the next server come a little later. The shard that a server is pushed last is never
among them: its order to step follows at once.
"""

from __future__ import annotations

from collections.abc import Sequence


def shards_in_backward(owners: Sequence[int], part: float) -> dict[int, list[int]]:
    """Return the shards that step in backward, by the rank of their server, in the order in which they are pushed.

    Args:
        owners: for each shard the rank of its server; backward pushes the last shard first.
        part: of each server's shards, 0 to 1.
    """
    led: dict[int, list[int]] = {}
    for shard in reversed(range(len(owners))):
        led.setdefault(owners[shard], []).append(shard)
    found: dict[int, list[int]] = {}
    for place, server in enumerate(sorted(led, reverse=True)):
        owed = place / len(led)  # servers begin at different places
        for shard in led[server][:-1]:
            owed += part
            if owed >= 1:
                owed -= 1
                found.setdefault(server, []).append(shard)
    return found
