"""What is shipped to be copied is read by the loader: cluster files, job templates, and the examples of both."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from psctl.spec.cluster import load_cluster
from psctl.spec.job_file import load_job
from psctl.spec.kinds import kind_of

ROOT = Path(__file__).parent.parent
CLUSTERS = sorted((ROOT / "clusters").glob("*.yaml"))
TEMPLATES = sorted((ROOT / "templates").glob("*/job.yaml"))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_shipped_cluster_file_is_valid_and_commented(path: Path) -> None:
    text = path.read_text()
    spec = load_cluster(text, path.name)
    assert spec.hosts or spec.kind == "slurm"
    assert kind_of(text, path.name) == "cluster"
    assert text.startswith("# "), "its first line says what it is for"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name)
def test_a_template_is_a_folder_with_a_valid_job_and_its_script(path: Path) -> None:
    job = load_job(path.read_text(), path.name)
    assert job.name == path.parent.name
    assert job.script is not None
    assert (path.parent / job.workdir / job.script).is_file()
    assert kind_of(path.read_text(), path.name) == "job"
    compile((path.parent / job.script).read_text(), job.script, "exec")


def test_every_document_is_in_the_sites_navigation_and_every_guide_in_the_index() -> None:
    docs = ROOT / "docs"
    navigation = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} == navigation
    index = set(re.findall(r"\]\((\S+?\.md)\)", (docs / "index.md").read_text()))
    assert {path.name for path in docs.glob("*.md")} - {"index.md"} <= index


def test_the_expected_files_are_shipped() -> None:
    assert {path.stem for path in CLUSTERS} >= {"local", "two-nodes", "lab", "cloud-existing"}
    assert {path.parent.name for path in TEMPLATES} == {
        "char-gpt",
        "ctr",
        "ddp",
        "digits",
        "hf-trainer",
        "l1-path",
        "lightning",
        "minimal",
        "resnet",
        "store",
    }


def test_the_digits_are_all_there_small_and_their_source_is_named() -> None:
    folder = ROOT / "templates" / "digits"
    packed = (folder / "digits.csv.gz").read_bytes()
    rows = [line.split(b",") for line in gzip.decompress(packed).splitlines()]
    assert len(packed) < 100_000
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    assert {int(float(row[64])) for row in rows} == set(range(10))
    assert {0.0, 16.0} <= {float(cell) for row in rows for cell in row[:64]} <= set(map(float, range(17)))
    source = (folder / "SOURCE.txt").read_text()
    assert "UCI Machine Learning Repository" in source
    assert "CC BY 4.0" in source


DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("templates/**/*.md")])

TREES = "psctl|tests|bench|docs|templates|clusters"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_path_that_a_document_names_exists(path: Path) -> None:
    """Paths of this project in code spans, `*` and a test's name after `::` allowed; links to other documents too."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    named = re.findall(rf"`((?:{TREES})/[\w./*-]*)", text)
    named += re.findall(rf"(?<![\w./`~-])((?:{TREES})/[\w./*-]+\.(?:py|md))", text)
    links = [found for found in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in found]
    missing = [each for each in dict.fromkeys(named) if not list(ROOT.glob(each.rstrip("./")))]
    missing += [each for each in dict.fromkeys(links) if not (path.parent / each).exists()]
    assert not missing, f"{path.relative_to(ROOT)}: {missing}"
