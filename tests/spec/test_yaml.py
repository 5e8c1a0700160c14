"""YAML becomes nodes with places; whatever is dangerous or ambiguous is refused with its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import InvalidFile
from psctl.spec import yaml_nodes


def test_every_key_and_value_has_its_line_and_column() -> None:
    node = yaml_nodes.parse("a: 1\nb:\n  - x\n  - {c: 'y'}\n", "f.yaml")
    assert isinstance(node, yaml_nodes.Mapping)
    assert [(entry.key, entry.where) for entry in node.entries] == [("a", "f.yaml:1:1"), ("b", "f.yaml:2:1")]
    items = node.get("b")
    assert isinstance(items, yaml_nodes.Sequence)
    assert items.items[0] == yaml_nodes.Scalar("x", False, "f.yaml:3:5")
    inner = items.items[1]
    assert isinstance(inner, yaml_nodes.Mapping)
    assert inner.get("c") == yaml_nodes.Scalar("y", True, "f.yaml:4:9")


def test_scalars_stay_as_they_are_written() -> None:
    node = yaml_nodes.parse("[2.10, on, 08, 1_000, 12:30:45, 2026-11-20, 0x10, ~]", "f")
    assert isinstance(node, yaml_nodes.Sequence)
    texts = [item.text for item in node.items if isinstance(item, yaml_nodes.Scalar)]
    assert texts == ["2.10", "on", "08", "1_000", "12:30:45", "2026-11-20", "0x10", "~"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "\n\n"])
def test_an_empty_file_is_a_null(text: str) -> None:
    node = yaml_nodes.parse(text, "f")
    assert isinstance(node, yaml_nodes.Scalar)
    assert node.null


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1", "a: duplicate key, first at f:1:1"),
        ("s:\n  a: 1\n  a: 2\n", "f:3:3", "s.a: duplicate key"),
        ("a: [1, 2\n", "f:2:1", "not YAML"),
        ("a:\n\t- b\n", "f:2:1", "not YAML"),
        ("a: b: c\n", "f:1:5", "not YAML: mapping values are not allowed here"),
        ("a: !!python/object/apply:os.system [id]\n", "f:1:4", "tag"),
        ("a: !!python/name:os.system x\n", "f:1:4", "tag"),
        ("a: !local x\n", "f:1:4", "tag"),
        ("a: &x [*x]\n", "f:1:8", "has no anchor before it"),
        ("a: 1\n---\nb: 2\n", "f:2:1", "second document"),
        ("? [a]\n: b\n", "f:1:3", "a key must be a scalar"),
        ("a: \x00\n", "f", "not YAML"),
    ],
)
def test_every_refusal_has_a_position(text: str, where: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        yaml_nodes.parse(text, "f")
    assert (caught.value.where, says in caught.value.message) == (where, True), caught.value.message


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5_000, "- " * 5_000 + "x"])
def test_deep_nesting_is_refused_not_followed(text: str) -> None:
    with pytest.raises(InvalidFile, match="nested deeper than 20 levels"):
        yaml_nodes.parse(text, "f")


def test_a_huge_file_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidFile, match="at most"):
        yaml_nodes.parse("#" * (yaml_nodes.LARGEST + 1), "f")


def test_an_alias_shares_its_node_so_that_a_bomb_stays_small() -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 18))
    node = yaml_nodes.parse(bomb, "f")
    assert isinstance(node, yaml_nodes.Mapping)
    last = node.get("a17")
    assert isinstance(last, yaml_nodes.Sequence)
    assert last.items[0] is last.items[8]


def test_a_value_from_the_command_line_is_placed_there() -> None:
    assert yaml_nodes.parse_value("ps", "--set sync.strategy=ps") == yaml_nodes.Scalar(
        "ps", False, "--set sync.strategy=ps"
    )


@given(st.text(alphabet="ab:-[]{}&*!#'\"\n \t|>%@", max_size=40))
def test_any_text_is_a_node_or_an_invalid_file_with_a_place(text: str) -> None:
    try:
        yaml_nodes.parse(text, "f.yaml")
    except InvalidFile as error:
        assert error.where.startswith("f.yaml")  # noqa: PT017 (either end is right)
