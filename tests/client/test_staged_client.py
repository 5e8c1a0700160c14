"""What a client with staged copies is asked for, it asks the client below: each word, argument and answer."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from psctl.sync.flat_parameters import Client
from psctl.sync.gpu_staging import Staged

METHODS = sorted(name for name, one in vars(Client).items() if inspect.isfunction(one) and not name.startswith("_"))
PROPERTIES = sorted(name for name, one in vars(Client).items() if isinstance(one, property))
ATTRIBUTES = sorted(Client.__annotations__)


class Below:
    """Notes what it is asked, and answers each with something of its own."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.answers: dict[str, object] = {}
        for name in ATTRIBUTES + PROPERTIES:
            setattr(self, name, object())

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(Client, name))

        def ask(*args: object, **more: object) -> object:
            self.asked.append((name, dict(list(signature.bind(None, *args, **more).arguments.items())[1:])))
            return self.answers.setdefault(name, {})

        return ask


class AtOnce:
    """Staging in which all is copied already."""

    def then(self, do: Any) -> None:
        do()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_there_is_something_to_pass_on() -> None:
    assert {"push", "wait", "close"} <= set(METHODS)
    assert {"bytes_moved"} <= set(PROPERTIES)
    assert {"base"} <= set(ATTRIBUTES)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes_all_arguments_on_and_the_answer_back(name: str) -> None:
    below = Below()
    staged: Any = Staged(below, AtOnce())  # type: ignore[arg-type]
    signature = inspect.signature(getattr(Client, name))
    given = {each: object() for each in list(signature.parameters)[1:]}
    by_word = {each: given[each] for each, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    answer = getattr(staged, name)(*(one for each, one in given.items() if each not in by_word), **by_word)
    assert below.asked == [(name, given)]
    if signature.return_annotation not in ("None", None):
        assert answer is below.answers[name]


@pytest.mark.parametrize("name", PROPERTIES + ATTRIBUTES)
def test_every_value_is_the_clients_own(name: str) -> None:
    below = Below()
    staged: Any = Staged(below, AtOnce())  # type: ignore[arg-type]
    assert getattr(staged, name) is getattr(below, name)
