"""A function's own keywords are not taken by the options of what looks at it."""

import functools
import queue

import pytest
import torch

from remat import checkpoint_policy, explain, fit, remat, save_nothing
from remat.plan import pareto
from remat.transforms import RematError

X = torch.ones(4, 4, requires_grad=True)
region = remat(lambda x: torch.tanh(x @ x).exp(), policy=checkpoint_policy(budget=0.5))


class Seen:
    """What a function was given, written down where no look puts it back."""

    def __init__(self):
        self.queue = queue.SimpleQueue()

    def append(self, one):
        self.queue.put(one)

    def __iter__(self):
        while not self.queue.empty():
            yield self.queue.get()

    def plain(self, x, *, device="none", budget=1.0, policies=(), scale=1.0):
        self.append((device, budget, policies, scale))
        return region(region(x)).sum() * scale

    def anything(self, x, **options):
        self.append(options)
        return region(region(x)).sum()


def look(which, fn, /, **keywords):
    if which is fit:
        return which(fn, X, **{"budget": 0.6, **keywords})
    return which(fn, X, **{**({"points": 2, "torch_solvers": ()} if which is pareto else {}), **keywords})


OPTION = {fit: {"budget": 0.6}, pareto: {"device": "h100"}, explain: {"policies": [save_nothing]}}
LOOKS = pytest.mark.parametrize("which", OPTION)


@LOOKS
def test_an_option_that_the_function_takes_too_is_refused(which):
    seen = Seen()
    (option,) = OPTION[which]
    said = rf"{option} is an option of {which.__name__}, and plain has an argument"
    with pytest.raises(RematError, match=said) as e:
        look(which, seen.plain, **OPTION[which])
    assert isinstance(e.value, TypeError) and not [*seen]
    assert f"kwargs={{'{option}': " in str(e.value) and "kwargs={})" in str(e.value)


@LOOKS
def test_with_kwargs_both_get_their_own(which):
    seen = Seen()
    (option,) = OPTION[which]
    look(which, seen.plain, **OPTION[which], kwargs={option: "mine"}, scale=2.0)
    found = [*seen]
    assert found and all("mine" in one and one[3] == 2.0 for one in found)
    look(which, seen.plain, **OPTION[which], kwargs={})
    found = [*seen]
    assert found and all(one == ("none", 1.0, (), 1.0) for one in found)


@LOOKS
def test_what_takes_any_keyword_is_given_those_that_are_no_options(which):
    seen = Seen()
    look(which, seen.anything, **OPTION[which], fn=3, kwargs={"scale": 2})
    found = [*seen]
    assert found and all(one == {"fn": 3, "scale": 2} for one in found)


@LOOKS
def test_a_module_and_a_partial_are_asked_for_their_arguments(which):
    class Model(torch.nn.Module):
        def forward(self, x, budget=0, device=None, policies=()):
            return region(region(x)).sum()

    for fn in (Model(), functools.partial(Model(), budget=1), functools.partial(Seen().plain)):
        with pytest.raises(RematError, match="is an option of"):
            look(which, fn, **OPTION[which])


@LOOKS
def test_a_keyword_given_twice_and_no_mapping_are_refused(which):
    with pytest.raises(RematError, match="'scale' is given both by itself and in kwargs"):
        look(which, Seen().anything, scale=1, kwargs={"scale": 2})
    with pytest.raises(RematError, match="expected keywords of the function"):
        look(which, Seen().anything, kwargs=["scale"])
