"""State is saved as JSON and named tensors, and restored equal."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import UsageError
from psctl.train_state.state_trees import pack, unpack

LEAVES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def through_json(packed):
    return msgspec.json.decode(msgspec.json.encode(packed))


@given(TREES)
def test_packed_state_is_restored_through_json(tree) -> None:
    packed, tensors = pack(tree, "x")
    assert unpack(through_json(packed), tensors) == tree
    assert not tensors


def test_tensors_are_named_by_their_path() -> None:
    tree = {"weight": torch.ones(2), "more": [torch.zeros(1), {"3": torch.eye(2)}]}
    packed, tensors = pack(tree, "track/ema")
    assert sorted(tensors) == ["track/ema/more/0", "track/ema/more/1/3", "track/ema/weight"]
    assert unpack(through_json(packed), tensors)["more"][1]["3"] is tree["more"][1]["3"]


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, Counter({3: 2}), OrderedDict(b=1, a=2), {"$tuple": 1}, (1, (2,))]
)
def test_values_that_json_lacks_are_restored(value) -> None:
    packed, tensors = pack({"value": value}, "x")
    back = unpack(through_json(packed), tensors)["value"]
    assert back == value
    assert type(back) is type(value)


def test_nan_is_restored() -> None:
    assert math.isnan(unpack(through_json(pack(math.nan, "x")[0]), {}))


def test_unsupported_values_are_refused_with_their_path_or_dropped() -> None:
    with pytest.raises(UsageError, match="track/ema/model/0 is a object"):
        pack({"model": [object()]}, "track/ema")
    packed, _ = pack({"keep": 1, "leave": object(), "rate": torch.tensor(0.5)}, "scheduler", drop=True)
    assert unpack(through_json(packed), {}) == {"keep": 1, "rate": 0.5}
