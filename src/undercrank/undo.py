"""The only code that changes an object that undercrank does not own.

Each function is a context manager that puts back exactly what was there, absence included, also after an
exception. Nest them (an ExitStack); leaving in the reverse order is then the only order there is.
Floor 0: standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

_ABSENT: Any = object()


@contextmanager
def swap_attr(obj: Any, name: str, value: Any) -> Iterator[Any]:
    """`obj.name = value` on the instance only; a class attribute below it is uncovered again on leaving.

    `object.__setattr__` is used since `nn.Module.__setattr__` files modules and parameters elsewhere.
    """
    descriptor = getattr(type(obj), name, None)
    assert not hasattr(type(descriptor), "__set__"), f"{name} of {type(obj).__name__} is kept by a descriptor"
    old = obj.__dict__.get(name, _ABSENT)
    object.__setattr__(obj, name, value)
    try:
        yield value
    finally:
        _refuse_foreign(obj.__dict__.get(name, value) is value, f"{name} of {type(obj).__name__}")
        if old is _ABSENT:
            obj.__dict__.pop(name, None)
        else:
            object.__setattr__(obj, name, old)


def subclass(cls: type, **body: Any) -> type:
    """A subclass for `swap_class` that goes by the name and the module of its class."""
    return type(cls.__name__, (cls,), {**body, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


@contextmanager
def swap_class(obj: Any, cls: type) -> Iterator[Any]:
    """Give `obj` another class (a subclass of its own): the way to override methods of one instance whole."""
    old = type(obj)
    assert issubclass(cls, old), f"{cls} is no subclass of {old}"
    obj.__class__ = cls
    try:
        yield obj
    finally:
        _refuse_foreign(type(obj) is cls, f"the class of a {old.__name__}")
        obj.__class__ = old


@contextmanager
def swap_child(module: Any, name: str, child: Any) -> Iterator[Any]:
    """Replace a child of an nn.Module under the same key, so that the order of the children is kept."""
    old = module._modules[name]
    module._modules[name] = child
    try:
        yield child
    finally:
        module._modules[name] = old


@contextmanager
def swap_item(mapping: MutableMapping[Any, Any], key: Any, value: Any) -> Iterator[Any]:
    """`mapping[key] = value`, and back, absence included."""
    old = mapping.get(key, _ABSENT)
    mapping[key] = value
    try:
        yield value
    finally:
        if old is _ABSENT:
            mapping.pop(key, None)
        else:
            mapping[key] = old


@contextmanager
def swap_env(name: str, value: str) -> Iterator[str]:
    """An environment variable that a library demands, for the length of a block."""
    with swap_item(os.environ, name, value):
        yield value


@contextmanager
def appended(items: list[Any], value: Any) -> Iterator[Any]:
    """`value` at the end of `items` for the length of a block; removed by identity, wherever it then stands."""
    items.append(value)
    try:
        yield value
    finally:
        index = next((i for i, item in enumerate(items) if item is value), None)
        if index is not None:
            del items[index]


@contextmanager
def hooked(registry: Any, hook: Any, name: str) -> Iterator[None]:
    """A hook, outermost in diffusers' registry of a module; gone on leaving."""
    registry.register_hook(hook, name)
    try:
        yield
    finally:
        registry.remove_hook(name, recurse=False)


@contextmanager
def kept(obj: Any, *names: str) -> Iterator[None]:
    """What a library's own calls make of these attributes of the instance inside the block is taken back after it."""
    before = {name: obj.__dict__.get(name, _ABSENT) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                obj.__dict__.pop(name, None)
            else:
                object.__setattr__(obj, name, value)


def _refuse_foreign(is_ours: bool, what: str) -> None:
    """What somebody else put over ours since must not be taken off, and ours below it cannot be: say so."""
    if not is_ours:
        raise RuntimeError(f"{what} was changed inside the block, or blocks were left in the wrong order")


def put_back(obj: Any, name: str, value: Any) -> None:
    """Set an attribute for good: for scrubbing our own values out of an object that we leave."""
    object.__setattr__(obj, name, value)
