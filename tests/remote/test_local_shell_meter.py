"""The meter of a shell counts what is put, fetched and given as input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from psctl.remote.local import LocalShell

SIZE = 3_000_001


class Meter:
    """Keeps the size and the counted bytes of each transfer."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    @contextmanager
    def transfer(self, host: str, size: int) -> Iterator[Callable[[int], None]]:
        moved = 0

        def count(more: int) -> None:
            nonlocal moved
            moved += more

        yield count
        self.seen.append((host, size, moved))


def test_what_is_put_fetched_and_given_as_input_is_counted(tmp_path: Path) -> None:
    shell, meter = LocalShell(name="here", home=str(tmp_path)), Meter()
    shell.meter = meter
    data = bytes(SIZE)
    shell.put(data, str(tmp_path / "a"))
    (tmp_path / "here").write_bytes(data)
    shell.put(tmp_path / "here", str(tmp_path / "b"))
    taken: list[bytes] = []
    assert shell.fetch(str(tmp_path / "b"), taken.append, SIZE) == SIZE
    assert shell.run(["wc", "-c"], stdin=data).stdout.strip() == str(SIZE).encode()
    assert meter.seen == [("here", SIZE, SIZE)] * 4
    shell.run(["true"])
    assert len(meter.seen) == 4, "a command without input is no transfer"
    shell.close()
