"""Which files of hosts are fetched, and their names here."""

from __future__ import annotations

import pytest

from psctl.launch.files.output_names import OutputFile, fault, local_names, selected


def made(host: str, name: str, size: int = 1) -> OutputFile:
    return OutputFile(host, name, size, 0, 0)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "a/./b", "a\0b", ".psctl-partial/x", "x" * 5000]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    assert fault(made("h", name))


def test_sizes_and_times_that_are_none_are_refused() -> None:
    assert fault(OutputFile("h", "a", -1, 0, 0))
    assert fault(OutputFile("h", "a", 1, 1 << 63, 0))
    assert not fault(made("h", "out/a b\n.txt"))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], ["a.png", "out/a.png", "out/deep/b.txt", "outer/c"]),
        (["out/"], ["out/a.png", "out/deep/b.txt"]),
        (["*.png"], ["a.png", "out/a.png"]),
        (["out/*.txt"], []),
        (["out/**/*.txt"], ["out/deep/b.txt"]),
        (["out/", "!*.png"], ["out/deep/b.txt"]),
        (["deep"], ["out/deep/b.txt"]),
    ],
)
def test_patterns_are_those_of_gitignore(patterns: list[str], names: list[str]) -> None:
    every = ["a.png", "out/a.png", "out/deep/b.txt", "outer/c"]
    assert [name for name in every if selected(name, patterns)] == names


FOLDERS = {"h1": "worker-0", "h2": "worker-2", "h3": "h3"}


def test_equal_contents_come_once_and_different_ones_by_rank() -> None:
    one, two, three = made("h1", "log"), made("h2", "log"), made("h3", "log")
    assert local_names([one, two], {one: "d", two: "d"}, FOLDERS) == {"log": [one, two]}
    assert local_names([one, two, three], {one: "d", two: "e", three: "d"}, FOLDERS) == {
        "worker-0/log": [one, three], "worker-2/log": [two],
    }  # fmt: skip
    assert local_names([one, two], {}, FOLDERS) == {"worker-0/log": [one], "worker-2/log": [two]}, "no hash is no match"
    assert local_names([one], {}, FOLDERS) == {"log": [one]}


def test_a_file_that_is_a_folder_of_another_host_gets_a_place_of_its_own() -> None:
    file, inner = made("h1", "out"), made("h2", "out/x")
    assert local_names([file, inner], {}, FOLDERS) == {"worker-0/out": [file], "out/x": [inner]}


def test_the_folder_of_a_rank_is_another_one_where_the_script_has_one_of_that_name() -> None:
    one, two, own = made("h1", "log"), made("h2", "log", 2), made("h1", "worker-0/log")
    found = local_names([one, two, own], {}, FOLDERS)
    assert found == {"worker-0/log": [own], "worker-0_/log": [one], "worker-2/log": [two]}
