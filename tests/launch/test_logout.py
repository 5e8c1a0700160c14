"""Hosts on which systemd-logind ends what a login session has started."""

from __future__ import annotations

import getpass
from pathlib import Path

import msgspec
import pytest

from psctl.launch.home import Home
from psctl.launch.remote_programs.host_state import logout_kills
from psctl.launch.setup import cluster_setup
from psctl.launch.setup.doctor import HostReport, check_logout
from tests.launch.test_actions import site
from tests.launch.test_link_measurement import reached

SESSION = "0::/user.slice/user-1000.slice/session-7.scope\n"
ME = getpass.getuser()


def settings(kill: str, only: str = "", excluded: str = "root0") -> str:
    return f"KillOnlyUsers={only}\nKillExcludeUsers={excluded}\nKillUserProcesses={kill}\n"


@pytest.mark.parametrize(
    ("cgroup", "answer", "kills"),
    [
        (SESSION, settings("yes"), True),
        (SESSION, settings("no"), False),
        (SESSION, settings("yes", excluded=f"root0 {ME}"), False),
        (SESSION, settings("yes", only=f"other {ME}"), True),
        (SESSION, settings("yes", only="other"), False),
        (SESSION, "Failed to connect to bus\n", False),
        (SESSION, None, False),
        ("12:memory:/x\n1:name=systemd:/user.slice/user-0.slice/session-c2.scope\n", settings("yes"), True),
        ("0::/system.slice/ssh.service\n", settings("yes"), False),
        ("0::/\n", settings("yes"), False),
    ],
)
def test_a_host_reports_that_logins_end_their_processes(
    cgroup: str, answer: str | None, kills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    if answer is not None:
        (tmp_path / "answer").write_text(answer)
        (tmp_path / "loginctl").write_text(
            f'#!/bin/sh\n[ "$*" = \'show-session --property=KillUserProcesses --property=KillOnlyUsers'
            f" --property=KillExcludeUsers' ] && cat {tmp_path}/answer\n"
        )
        (tmp_path / "loginctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if answer is not None else str(tmp_path))
    assert logout_kills(str(tmp_path / "cgroup")) is kills


def test_doctor_names_the_setting() -> None:
    report = HostReport("node-a")
    check_logout(report, site())
    assert report.checks == []
    check_logout(report, site(logout_kills=True))
    (row,) = report.checks
    assert (row.check, row.ok) == ("logout", False)
    assert "KillExcludeUsers" in row.cure


def test_up_and_train_warn_of_it(tmp_path: Path) -> None:
    found = reached("a", "b", home=Home(tmp_path))
    assert cluster_setup.carry_out(found, lambda *_: None) == ()
    found.sites["b"] = msgspec.structs.replace(found.sites["b"], logout_kills=True)
    (warning,) = cluster_setup.carry_out(found, lambda *_: None)
    assert warning.startswith("b: systemd-logind ends what a login started")
    assert "KillExcludeUsers" in warning
