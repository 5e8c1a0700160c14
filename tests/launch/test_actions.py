"""What `up` decides, as tables: what was found on a host -> what is to be done there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from psctl import errors
from psctl.launch.hosts.actions import HostNeeds, Install, decide, missing, torch_of, torch_to_ask_for
from psctl.launch.hosts.site import HostSite
from psctl.topology.facts import HostFacts
from psctl.topology.readers.probe import parse_probe

FULL = {
    "msgspec": "0.21.0", "cryptography": "47.0", "psutil": "6.0", "numpy": "2.1",
    "torch": "2.5.1+cu124", "pip": "24.0", "ensurepip": None,
}  # fmt: skip
WANTS = HostNeeds(code="c0de", code_size=1000, managed=False, torch="2.5.1")
GB = 10**9


def facts() -> HostFacts:
    return parse_probe("")


def site(**changes: Any) -> HostSite:
    plain = HostSite(
        name="node-a", facts=facts(), executable="/usr/bin/python3", version="3.11.4", paths=["/usr/lib/dist-packages"],
        modules=dict(FULL), cuda=None, workdir="/w", free=50 * GB, writable=True, open=None, skew=0.0,
        codes={}, environments={}, ready=None, jobs=[], names=[], cores=8,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


READY = {"type": "WriteReady", "code": "c0de", "key": "", "python": "/usr/bin/python3"}


def printed(found: HostSite, wants: HostNeeds = WANTS) -> list[str]:
    return [str(action) for action in decide(found, wants)]


def test_a_fresh_host_with_all_packages_gets_psctl_and_nothing_else() -> None:
    assert printed(site()) == ["send psctl (1 kB) to code/c0de", "write ready.json"]


def test_a_host_that_is_as_wanted_has_nothing_to_do() -> None:
    assert printed(site(codes={"c0de": True}, ready=READY)) == []


def test_a_new_psctl_is_sent_and_made_the_one_in_use() -> None:
    found = site(codes={"c0de": False}, ready={**READY, "code": "old"})
    assert printed(found) == ["send psctl (1 kB) to code/c0de", "write ready.json"]


def test_what_an_existing_python_lacks_goes_into_an_environment_that_sees_it() -> None:
    lacking = site(modules={**FULL, "msgspec": None, "psutil": "5.0"}, codes={"c0de": True})
    make, install, ready = printed(lacking)
    assert make.endswith("with /usr/bin/python3 that sees the packages already there")
    assert install.startswith("install msgspec>=0.21 psutil>=5.9 into envs/")
    assert ready == "write ready.json"


def test_a_missing_torch_is_this_machines_version() -> None:
    lacking = site(modules={**FULL, "torch": None})
    assert "install torch==2.5.1 into" in " ".join(printed(lacking))


def test_an_environment_that_is_there_is_used_as_it_is() -> None:
    lacking = site(modules={**FULL, "msgspec": None})
    actions = decide(lacking, WANTS)
    key = actions[-1].key  # type: ignore[union-attr]
    again = msgspec.structs.replace(
        lacking, codes={"c0de": True}, environments={key: {"packages": []}}, ready=msgspec.to_builtins(actions[-1])
    )
    assert printed(again) == []


def test_managed_installs_everything_from_the_wheelhouse_without_an_index() -> None:
    wants = HostNeeds(
        code="c0de",
        code_size=1,
        managed=True,
        torch="2.5.1",
        requirements=("einops",),
        wheels="77",
        wheels_size=10,
        wheels_pip=True,
    )
    actions = decide(site(modules=dict.fromkeys(FULL)), wants)
    assert [type(action).__name__ for action in actions] == [
        "SendCode", "SendWheels", "MakeEnvironment", "Install", "WriteReady",
    ]  # fmt: skip
    install = actions[3]
    assert install.options == ("--no-index",)  # type: ignore[union-attr]
    assert "torch==2.5.1" in install.packages  # type: ignore[union-attr]
    assert "einops" in install.packages  # type: ignore[union-attr]


def test_packages_come_from_the_index_that_was_given_or_from_where_pip_itself_looks() -> None:
    lacking = site(modules={**FULL, "torch": None})
    given = (None, "https://example.org/simple")
    options = [
        action.options
        for index in given
        for action in decide(lacking, msgspec.structs.replace(WANTS, index=index))
        if isinstance(action, Install)
    ]
    assert options == [(), ()], "the index may hold a password, and is on no command line"


@pytest.mark.parametrize(
    ("version", "source", "asked"),
    [
        ("2.5.1", False, "2.5.1"), ("2.5.1+cpu", False, "2.5.1"), ("2.5.1+cu124", False, "2.5.1"),
        ("2.5.1+cu124", True, "2.5.1+cu124"), ("2.5.1+ours", False, "2.5.1+ours"),
    ],
)  # fmt: skip
def test_a_build_of_torch_is_requested_only_where_something_is_given_that_may_serve_it(
    version: str, source: bool, asked: str
) -> None:
    assert torch_to_ask_for(version, source=source) == asked


def test_the_error_for_a_host_without_pip_names_the_package_to_install() -> None:
    bare = site(modules={**FULL, "msgspec": None, "pip": None, "ensurepip": None})
    with pytest.raises(errors.PythonMissing, match="neither pip nor ensurepip") as raised:
        decide(bare, WANTS)
    assert "python3-venv" in raised.value.hint


def test_a_full_or_locked_disk_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(errors.DiskFull, match="left where /w is"):
        decide(site(free=1000), WANTS)
    with pytest.raises(errors.DiskFull, match="cannot be written"):
        decide(site(writable=False), WANTS)


def test_a_disk_without_inodes_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(errors.DiskFull, match=r"12 more files can be made where /w is \(inodes\)") as raised:
        decide(site(inodes=12), WANTS)
    assert "df -i" in raised.value.hint
    with pytest.raises(errors.DiskFull, match="5000 more files"):
        decide(site(inodes=5000, modules={**FULL, "torch": None, "pip": "24.0"}), WANTS)
    assert decide(site(inodes=5000), WANTS)
    assert decide(site(inodes=None), WANTS)


def test_a_workdir_that_others_may_write_is_refused_before_anything_is_done() -> None:
    why = {"why": "others may write /w (mode 777)", "cure": "chmod go-w /w"}
    for found in (site(open=why), site(open=why, codes={"c0de": True}, ready=READY)):
        with pytest.raises(errors.InvalidFile, match="node-a: others may write /w") as raised:
            decide(found, WANTS)
        assert raised.value.hint.startswith("on node-a: chmod go-w /w")


def test_missing_counts_versions_that_are_too_old() -> None:
    old = site(modules={**FULL, "torch": "2.3.9"})
    assert missing(old, msgspec.structs.replace(WANTS, torch="")) == ["torch>=2.4"]
    assert missing(old, WANTS) == ["torch==2.5.1"]
    assert missing(site(modules={**FULL, "torch": "2.10"}), WANTS) == []
    assert missing(site(), WANTS) == []


@pytest.mark.parametrize("managed", [True, False])
def test_torch_none_installs_no_torch(managed: bool) -> None:
    wants = msgspec.structs.replace(WANTS, torch=None, managed=managed)
    bare = site(modules={"pip": "24.0", "ensurepip": "24.0"})
    assert "install msgspec>=0.21 cryptography>=47 psutil>=5.9 numpy>=1.26 into" in " ".join(printed(bare, wants))
    assert missing(site(modules={**FULL, "torch": None}), wants) == []


def test_the_torch_that_workers_import_is_compared_without_its_build() -> None:
    assert torch_of(site(), WANTS) == "2.5.1"
    assert torch_of(site(), msgspec.structs.replace(WANTS, managed=True, torch="2.6.0")) == "2.6.0"
