"""Regions of modules whose classes do something of their own when an instance or a subclass is made."""

import abc
import copy
import pickle
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

import remat
from tests.helpers import same

HAPPENED: list[str] = []
T = TypeVar("T")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class WithArguments(Plain):
    """Keeps what it was made with, as neuraloperator's models do."""

    def __new__(cls, *, width):
        HAPPENED.append("new")
        self = super().__new__(cls)
        self.made_with = width
        return self

    def __init__(self, *, width):
        super().__init__()


class Single(Plain):
    """Of which there is one instance."""

    one = None

    def __new__(cls):
        HAPPENED.append("new")
        Single.one = Single.one or super().__new__(cls)
        return Single.one


class Registered(Plain):
    known: dict = {}

    def __init_subclass__(cls, *, label, **kwargs):
        super().__init_subclass__(**kwargs)
        HAPPENED.append("subclass")
        if label in Registered.known:
            raise TypeError(f"{label} is registered twice")
        Registered.known[label] = cls


class Labelled(Registered, label="a"):
    pass


class Meta(type):
    def __new__(mcls, name, bases, names, **kwargs):
        HAPPENED.append(f"meta new {name}")
        return super().__new__(mcls, name, bases, names)

    def __init__(cls, *args, **kwargs):
        HAPPENED.append("meta init")
        super().__init__(*args)

    def __call__(cls, *args, **kwargs):
        HAPPENED.append("meta call")
        return super().__call__(*args, **kwargs)


class OfMeta(Plain, metaclass=Meta):
    pass


class MetaOfAbc(abc.ABCMeta):
    def __new__(mcls, name, bases, names):
        HAPPENED.append(f"meta new {name}")
        return super().__new__(mcls, name, bases, names)


class Abstract(Plain, metaclass=MetaOfAbc):
    @abc.abstractmethod
    def width(self): ...


class Concrete(Abstract):
    def width(self):
        return 3


class Guarded(Plain):
    """Takes no attributes but its own."""

    def __setattr__(self, name, value):
        if name not in ("training", "linear") and not name.startswith(
            ("_parameters", "_buffers", "_modules")
        ):
            HAPPENED.append(f"set {name}")
        super().__setattr__(name, value)


class OfDict(nn.Module, dict):
    """A module that is a dict as well."""

    def __new__(cls, width):
        HAPPENED.append("new")
        return super().__new__(cls)

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    __hash__ = nn.Module.__hash__  # type: ignore[assignment]
    __eq__ = nn.Module.__eq__  # type: ignore[assignment]

    def forward(self, x):
        return torch.tanh(self.linear(x))


class AbstractFirst(abc.ABC, Plain):
    def __repr__(self):
        return "AbstractFirst()"


class GenericFirst(Generic[T], Plain):
    pass


MAKERS = {
    "abc first": lambda: AbstractFirst(),
    "generic first": lambda: GenericFirst(),
    "new with arguments": lambda: WithArguments(width=3),
    "singleton": lambda: Single(),
    "registry": lambda: Labelled(),
    "metaclass": lambda: OfMeta(),
    "abc": lambda: Concrete(),
    "setattr": lambda: Guarded(),
    "dict too": lambda: OfDict(3),
}


@pytest.mark.parametrize("way", ["remat", "apply_to"])
@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_of_the_class_runs(kind, way):
    module = MAKERS[kind]()
    cls = type(module)
    x = torch.randn(2, 3, requires_grad=True)
    want = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    HAPPENED.clear()
    known = dict(Registered.known)
    region = remat.remat(module) if way == "remat" else remat.nn.apply_to(module)
    for _ in range(2):
        got = torch.autograd.grad(region(x).sum(), [x, *module.parameters()])
        same(got, want)
    assert HAPPENED == []
    assert Registered.known == known
    assert isinstance(region, cls)
    assert type(region).__name__ == cls.__name__
    assert type(region).__qualname__ == cls.__qualname__
    assert repr(region).startswith("remat(" + cls.__name__)
    if way == "apply_to":
        assert type(remat.nn.remove(region)) is cls
    assert HAPPENED == []


def test_abstract_classes_tell_instances_apart():
    # A subclass that shared its base's memory would answer for it.
    module = Concrete()
    view = remat.remat(module)
    assert not isinstance(Concrete(), type(view))
    assert isinstance(Concrete(), Concrete)

    class Other(Concrete):
        pass

    assert not isinstance(Other(), type(view))
    assert isinstance(Other(), Concrete)
    assert isinstance(view, Concrete)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_class_with_arguments(again):
    module = remat.nn.apply_to(WithArguments(width=3))
    HAPPENED.clear()
    made = again(module)
    assert HAPPENED == []
    assert made.made_with == 3
    assert isinstance(made, WithArguments)
    x = torch.randn(2, 3)
    same(made(x), module(x))
