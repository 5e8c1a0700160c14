"""`network.encryption` of a cluster file."""

from __future__ import annotations

import pytest

from psctl.errors import InvalidFile
from psctl.spec.cluster import load_cluster


@pytest.mark.parametrize(("text", "value"), [("", "on"), ("encryption: on", "on"), ("encryption: off", "off")])
def test_connections_are_encrypted_unless_the_file_says_otherwise(text: str, value: str) -> None:
    spec = load_cluster(f"version: 1\nname: lab\nhosts: [a]\nnetwork: {{{text}}}\n", "cluster.yaml")
    assert spec.network.encryption == value


def test_what_is_required_cannot_be_off() -> None:
    text = "version: 1\nname: lab\nhosts: [a]\nnetwork:\n  require_encryption: true\n  encryption: off\n"
    with pytest.raises(InvalidFile, match="off cannot be combined with require_encryption") as caught:
        load_cluster(text, "cluster.yaml")
    assert caught.value.where.startswith("cluster.yaml:6:")
