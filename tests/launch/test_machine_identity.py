"""What a host says of its disk and of which machine it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.launch.remote_programs import host_state
from psctl.launch.remote_programs.host_state import machine_id
from psctl.launch.setup.doctor import HostReport, check_disk
from tests.launch.test_actions import site


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 40 files."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=40", "none", str(folder)], check=False)
    if done.returncode != 0:
        pytest.skip("this container may not mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_free_inodes_are_those_of_the_disk(tiny: Path) -> None:
    before = host_state.free_inodes(str(tiny / "not/there/yet"))
    assert before is not None
    assert 30 < before < 40
    for number in range(5):
        (tiny / str(number)).touch()
    assert host_state.free_inodes(str(tiny)) == before - 5
    assert host_state.free_space(str(tiny)) == 64 << 20


@pytest.mark.parametrize(
    ("inodes", "ok", "detail"),
    [
        (12, False, "50 GB but only 12 more files (inodes) left at /w"),
        (1_200_000, True, "50 GB, 1.2M files left"),
        (None, True, "50 GB left"),
    ],
)
def test_doctor_sees_inodes_beside_bytes(inodes: int | None, ok: bool, detail: str) -> None:
    report = HostReport("node-a")
    check_disk(report, site(inodes=inodes), None)
    (row,) = report.checks
    assert (row.check, row.ok, row.detail) == ("disk", ok, detail)
    assert ("df -i" in row.cure) is not ok


def test_a_machine_is_known_by_its_installation_and_its_cards(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def now() -> str:
        return machine_id(str(tmp_path))

    seen = [now()]
    write("etc/machine-id", "0123\n")
    seen.append(now())
    write("sys/class/net/eth0/device/vendor", "0x15b3\n")
    write("sys/class/net/eth0/address", "02:00:00:00:00:01\n")
    seen.append(now())
    write("sys/class/net/docker0/address", "02:42:00:00:00:09\n")
    assert now() == seen[-1]
    write("sys/class/net/eth0/bonding_slave/perm_hwaddr", "02:00:00:00:00:07\n")
    seen.append(now())
    write("sys/class/net/eth0/address", "02:00:00:00:00:08\n")  # the bond's
    assert now() == seen[-1]
    assert len(set(seen)) == 4
    assert "0123" not in "".join(seen)
