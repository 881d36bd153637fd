"""Whatever undo changes is put back: absence, order and class included, after an exception too."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undercrank import undo


class Boom(Exception):
    pass


class Thing:
    colour = "red"


class Filing:
    """Files what is set elsewhere, as nn.Module does with modules."""

    def __init__(self) -> None:
        self.__dict__["filed"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        self.filed[name] = value


def test_an_attribute_is_swapped_and_comes_back() -> None:
    thing = SimpleNamespace(size=1)
    with undo.swap_attr(thing, "size", 2) as value:
        assert thing.size == value == 2
    assert thing.size == 1


def test_an_absent_attribute_is_absent_again() -> None:
    thing = Thing()
    with undo.swap_attr(thing, "size", 2):
        assert thing.size == 2
    assert vars(thing) == {}


def test_a_class_attribute_is_covered_on_the_instance_only() -> None:
    thing, other = Thing(), Thing()
    with undo.swap_attr(thing, "colour", "blue"):
        assert (thing.colour, other.colour, Thing.colour) == ("blue", "red", "red")
    assert thing.colour == "red"
    assert vars(thing) == {}


def test_an_attribute_whose_value_is_none_comes_back_as_none() -> None:
    thing = SimpleNamespace(size=None)
    with undo.swap_attr(thing, "size", 2):
        pass
    assert vars(thing) == {"size": None}


def test_the_object_s_own_setattr_is_passed_by() -> None:
    thing = Filing()
    with undo.swap_attr(thing, "child", 1):
        assert thing.__dict__["child"] == 1
    undo.put_back(thing, "child", 2)
    assert thing.__dict__["child"] == 2
    assert thing.filed == {}


class Kept:
    """Its size is kept by a property, which a value in the instance's dict would never cover."""

    def __init__(self) -> None:
        self.inner = 1

    @property
    def size(self) -> int:
        return self.inner

    @size.setter
    def size(self, value: int) -> None:
        self.inner = value

    @property
    def weight(self) -> int:
        return 5


@pytest.mark.parametrize("name", ["size", "weight"])
def test_swap_attr_refuses_a_name_kept_by_a_descriptor(name: str) -> None:
    kept = Kept()
    with pytest.raises(AssertionError, match=f"{name} of Kept is kept by a descriptor"), undo.swap_attr(kept, name, 2):
        pytest.fail("swapped")
    assert (kept.size, kept.weight, vars(kept)) == (1, 5, {"inner": 1})


def test_a_method_is_no_such_descriptor_and_is_covered_like_any_class_attribute() -> None:
    class Caller:
        def call(self) -> str:
            return "own"

    caller = Caller()
    with undo.swap_attr(caller, "call", lambda: "other"):
        assert caller.call() == "other"
    assert caller.call() == "own"
    assert vars(caller) == {}


def test_an_attribute_that_was_deleted_inside_is_no_trouble() -> None:
    thing = Thing()
    with undo.swap_attr(thing, "size", 2):
        del thing.size
    assert vars(thing) == {}


def test_a_class_is_swapped_for_a_subclass_and_comes_back() -> None:
    class Louder(Thing):
        colour = "loud"

    thing = Thing()
    with undo.swap_class(thing, Louder) as same:
        assert same is thing
        assert thing.colour == "loud"
    assert type(thing) is Thing


def test_a_class_that_is_no_subclass_is_refused_before_anything_changes() -> None:
    thing = Thing()
    with pytest.raises(AssertionError, match="no subclass"), undo.swap_class(thing, Filing):
        pass
    assert type(thing) is Thing


def test_a_child_is_swapped_at_its_place_among_the_children() -> None:
    module = SimpleNamespace(_modules={"first": 1, "second": 2, "third": 3})
    with undo.swap_child(module, "second", 20):
        assert list(module._modules.items()) == [("first", 1), ("second", 20), ("third", 3)]
    assert list(module._modules.items()) == [("first", 1), ("second", 2), ("third", 3)]


def test_a_child_that_is_not_there_cannot_be_swapped() -> None:
    module = SimpleNamespace(_modules={})
    with pytest.raises(KeyError), undo.swap_child(module, "second", 20):
        pass
    assert module._modules == {}


def test_an_item_is_swapped_absence_included() -> None:
    table = {"a": 1, "b": None}
    with undo.swap_item(table, "a", 2), undo.swap_item(table, "b", 3), undo.swap_item(table, "c", 4):
        assert table == {"a": 2, "b": 3, "c": 4}
    assert list(table.items()) == [("a", 1), ("b", None)]


def test_an_environment_variable_is_swapped_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERCRANK_TEST_A", "1")
    monkeypatch.delenv("UNDERCRANK_TEST_B", raising=False)
    with undo.swap_env("UNDERCRANK_TEST_A", "2"), undo.swap_env("UNDERCRANK_TEST_B", "3"):
        assert (os.environ["UNDERCRANK_TEST_A"], os.environ["UNDERCRANK_TEST_B"]) == ("2", "3")
    assert os.environ["UNDERCRANK_TEST_A"] == "1"
    assert "UNDERCRANK_TEST_B" not in os.environ


def test_an_appended_value_is_removed_by_identity_wherever_it_stands() -> None:
    equal, mine = [1], [1]
    items: list[Any] = [equal]
    with undo.appended(items, mine):
        assert items[-1] is mine
        items.append([1])
        items.reverse()
    assert len(items) == 2
    assert all(item is not mine for item in items)
    assert items[-1] is equal


def test_an_appended_value_that_somebody_removed_is_no_trouble() -> None:
    items: list[Any] = ["first"]
    with undo.appended(items, "mine"):
        items.clear()
        items.append("other")
    assert items == ["other"]


SWAPS = {
    "attr": lambda thing: undo.swap_attr(thing, "size", 2),
    "new attr": lambda thing: undo.swap_attr(thing, "weight", 2),
    "class": lambda thing: undo.swap_class(thing, type("Louder", (type(thing),), {})),
    "child": lambda thing: undo.swap_child(thing, "second", 20),
    "item": lambda thing: undo.swap_item(thing.__dict__, "size", 9),
    "new item": lambda thing: undo.swap_item(thing._modules, "fourth", 4),
    "appended": lambda thing: undo.appended(thing.hooks, object()),
}


def a_thing() -> Thing:
    thing = Thing()
    thing.__dict__.update(size=1, _modules={"first": 1, "second": 2}, hooks=["own"])
    return thing


def described(thing: Thing) -> Any:
    return type(thing), [(name, list(v.items()) if isinstance(v, dict) else v) for name, v in vars(thing).items()]


@pytest.mark.parametrize("name", SWAPS)
def test_an_exception_inside_changes_nothing_about_putting_back(name: str) -> None:
    thing = a_thing()
    with pytest.raises(Boom), SWAPS[name](thing):
        assert described(thing) != described(a_thing())
        raise Boom
    assert described(thing) == described(a_thing())


@given(st.lists(st.sampled_from(sorted(SWAPS)), max_size=12), st.booleans())
def test_any_nest_of_swaps_leaves_the_object_as_it_was(names: list[str], fails: bool) -> None:
    thing = a_thing()
    try:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(SWAPS[name](thing))
            if fails:
                raise Boom
    except Boom:
        assert fails
    assert described(thing) == described(a_thing())


def test_what_a_library_leaves_behind_is_taken_back() -> None:
    thing = a_thing()
    with pytest.raises(Boom), undo.kept(thing, "size", "left", "hooks"):
        thing.__dict__.update(size=7, left="behind")
        del thing.__dict__["hooks"]
        raise Boom
    assert dict(vars(thing)) == dict(vars(a_thing()))


def test_a_subclass_goes_by_the_name_and_module_of_its_class() -> None:
    class Before:
        def answer(self) -> int:
            return 1

    after = undo.subclass(Before, answer=lambda self: 2)
    assert issubclass(after, Before) and after is not Before and after().answer() == 2
    assert (after.__name__, after.__qualname__, after.__module__) == (
        Before.__name__, Before.__qualname__, Before.__module__
    )  # fmt: skip


def test_a_hook_is_gone_with_its_block_and_the_forward_is_what_it_was() -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Twice(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 2

    module = torch.nn.Linear(1, 1)
    registry, stock = HookRegistry.check_if_exists_or_initialize(module), module.forward
    x = torch.ones(1)
    with pytest.raises(Boom), undo.hooked(registry, Twice(), "twice"):
        assert torch.equal(module(x), stock(x) * 2)
        raise Boom
    assert registry.hooks == {} and torch.equal(module(x), stock(x))
