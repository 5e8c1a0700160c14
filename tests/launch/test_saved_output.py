"""Saved machines: a file, standard input, a folder, folders of folders; names of files say nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from psctl.errors import InvalidFile
from psctl.launch.measure import saved_output
from psctl.launch.measure.saved_output import read_saved
from psctl.topology.host.document import cluster_document

CAPTURED = Path(__file__).resolve().parent.parent / "captured"
MESH = CAPTURED / "topo-m" / "dgx1v-v100x8-mlx5x4-tabs.txt"
PAIR = CAPTURED / "topo-m" / "rtx3090x2-nv4.txt"
LINKS = CAPTURED / "nvlink-s" / "rtx3090x2-4links-tabs.txt"
NCCL = CAPTURED / "nccl-xml" / "azure-ncv4-a100x4.xml"


def gpus(found, host=0):
    return [device.id for device in found.cluster.hosts[host].graph.of_kind("gpu")]


def whats(found, host=0):
    return [finding.what for finding in found.cluster.hosts[host].graph.findings]


def test_a_file_is_a_host_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "rocm.xml.csv").write_bytes(MESH.read_bytes())
    found = read_saved(str(tmp_path / "rocm.xml.csv"))
    assert [host.name for host in found.cluster.hosts] == ["saved"]
    assert gpus(found) == [f"GPU{i}" for i in range(8)]
    assert gpus(read_saved(str(NCCL))) == [f"GPU{i}" for i in range(4)]


def test_a_folder_is_one_host_and_its_files_are_joined(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    shutil.copy(PAIR, folder / "1")
    shutil.copy(LINKS, folder / "2")
    found = read_saved(str(folder))
    assert [host.name for host in found.cluster.hosts] == ["box"]
    names = {device.name for device in found.cluster.hosts[0].graph.of_kind("gpu")}
    assert len(names) == 1 and "3090" in names.pop()  # the matrix tells no names, the links do


def test_folders_in_a_folder_are_hosts(tmp_path: Path) -> None:
    for name, file in (("b", MESH), ("a", PAIR)):
        (tmp_path / name).mkdir()
        shutil.copy(file, tmp_path / name / "x")
    (tmp_path / ".git").mkdir()
    found = read_saved(str(tmp_path))
    assert [host.name for host in found.cluster.hosts] == ["a", "b"]
    assert [len(gpus(found, i)) for i in (0, 1)] == [2, 8]
    (tmp_path / "b" / "deeper").mkdir()
    assert "deeper/ was not read: a folder within a host's folder" in whats(read_saved(str(tmp_path)), 1)


def test_what_is_not_understood_in_a_folder_is_a_finding_each(tmp_path: Path) -> None:
    shutil.copy(PAIR, tmp_path / "matrix")
    (tmp_path / "notes.md").write_text("# bought in May\n")
    (tmp_path / ".DS_Store").write_bytes(b"\0\1")
    (tmp_path / "empty").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "large").write_bytes(b"x" * (saved_output.LARGEST + 1))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        found = whats(read_saved(str(tmp_path)))
    told = {
        what.split(" was not read: ")[0]: what.split(" was not read: ")[1] for what in found if "was not read" in what
    }
    assert told == {
        "notes.md": 'it is not a known output; it begins with "# bought in May"',
        ".DS_Store": "hidden", "empty": "it is empty",
        "pipe": "it is not a regular file", "socket": "it is not a regular file",
        "gone": "No such file or directory", "large": "it is larger than 16 MB; no such command prints that much",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"), ("\n \n", "it is empty"), ("hello\nworld", 'begins with "hello"'),
        ("{", "begins as JSON and is not valid"), ('{"a": 1}', 'neither "hosts" nor "devices"'),
        ('{"hosts": []}', "empty"), ('{"hosts": 3}', "hosts"), ("{}", 'neither "hosts" nor "devices"'),
        ('{"devices": [{"id": "GPU0", "kind": "toaster"}], "links": []}', "toaster"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "topo-m.txt"
    path.write_text(text)
    with pytest.raises(InvalidFile) as caught:
        read_saved(str(path))
    assert str(path) in caught.value.message and why in caught.value.message
    assert caught.value.where == str(path)
    assert "nvidia-smi topo -m" in caught.value.hint


def test_folders_without_anything_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="this folder has no known output: it is empty"):
        read_saved(str(tmp_path))
    (tmp_path / "x").write_text("what?")
    with pytest.raises(InvalidFile, match=r'x was not read: .* "what\?"'):
        read_saved(str(tmp_path))
    with pytest.raises(InvalidFile, match="No such file"):
        read_saved(str(tmp_path / "nowhere"))


def test_an_output_without_devices_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut").write_text('<system version="1">\n</system>\n')
    with pytest.raises(InvalidFile, match="cut: nothing can be read from it"):
        read_saved(str(tmp_path / "cut"))


def test_a_broken_driver_is_a_host_with_a_finding(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("No devices were found\n")
    found = read_saved(str(tmp_path / "x"))
    assert found.cluster.hosts[0].graph.devices == ()
    assert whats(found)


def test_a_pipe_that_a_person_names_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(MESH.read_bytes()))
    writer.start()
    assert len(gpus(read_saved(str(tmp_path / "pipe")))) == 8
    writer.join()


def test_what_topo_prints_is_read_back_whole(tmp_path: Path) -> None:
    first = read_saved(str(MESH))
    document = cluster_document(first.cluster)
    document["hosts"][0] |= {"name": "dgx", "cores": 80, "memory": 5e11}
    failed = {"name": "dead", "devices": [], "links": [], "error": {"code": "timed-out", "message": "no answer"}}
    document["hosts"].append(failed)
    (tmp_path / "t").write_text(json.dumps(document))
    again = read_saved(str(tmp_path / "t"))
    assert again.cluster.hosts[0].graph == first.cluster.hosts[0].graph
    assert again.about["dgx"] == {"cores": 80, "memory": 5e11}
    assert again.failed == (failed,)
    (tmp_path / "one").write_text(json.dumps(document["hosts"][0]))
    assert read_saved(str(tmp_path / "one")).cluster.hosts == again.cluster.hosts


def test_two_hosts_of_one_name_are_refused(tmp_path: Path) -> None:
    document = cluster_document(read_saved(str(PAIR)).cluster)
    for name in "ab":
        (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(InvalidFile, match="two hosts are named saved"):
        read_saved(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"hosts":' + "[" * 1_000_000, "nested too deeply"),
        (
            '{"hosts":[{"name":"a","devices":[],"links":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}]}",
            "nested too deeply",
        ),
        ("GPU0\t X \tNV1\tSYS\n" * 150_000, "larger than 2 MB"),
    ],
    ids=["lists", "objects", "text"],
)
def test_hostile_files_are_refused(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InvalidFile, match=what):
        read_saved(str(tmp_path / "file"))
