"""Files that a user names are read up to what a YAML document may have, and no further."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from psctl.errors import InvalidFile
from psctl.launch.clusters import MOST_BYTES, read_text


def test_a_file_without_end_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidFile, match="larger than"):
        read_text(Path("/dev/zero"), "a cluster file")


def test_a_large_file_is_refused_and_one_at_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"#" * (MOST_BYTES + 1))
    (tmp_path / "most").write_bytes(b"#" * MOST_BYTES)
    with pytest.raises(InvalidFile, match="larger than"):
        read_text(tmp_path / "large", "a job file")
    assert len(read_text(tmp_path / "most", "a job file")) == MOST_BYTES


def test_a_pipe_is_read_as_a_shell_gives_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("name: a\n",))
    writer.start()
    assert read_text(tmp_path / "pipe", "a job file") == "name: a\n"
    writer.join()
