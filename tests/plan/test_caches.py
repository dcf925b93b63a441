"""What is remembered of plans: hit by what looks alike, missed by what does not, bounded, holding nothing."""

import functools
import gc
import types
import weakref

import pytest
import torch

from remat import checkpoint_policy, fit, nn, remat, save_names
from remat.plan import BudgetPolicy
from remat.policies import save_every_nth, save_matmuls, where
from tests.helpers import crossed, same
from tests.plan.inside import BoundedCache, Graph, cache, call_key, record, registered

X = torch.randn(4, 8, requires_grad=True)
FLAG = False


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def step(fn, *args, **kwargs):
    fn(*(args or (X,)), **kwargs).sum().backward()


def of_module(block, captured):
    return block


def of_closure(block, captured):
    return lambda x: block(x) + captured


def of_partial(block, captured):
    return functools.partial(lambda b, x: b(x) + captured, block)


def of_method(block, captured):
    return block.forward


def of_default(block, captured):
    return lambda x, b=block: b(x) + captured


@pytest.mark.parametrize(
    ("policy", "how"),
    crossed(
        [BudgetPolicy(0.5), BudgetPolicy(1.0, peak=1 << 30), save_matmuls],
        [of_module, of_closure, of_partial, of_method, of_default],
    ),
)
def test_what_was_planned_is_freed(policy, how):
    block, captured = model(), torch.randn(8)
    region = remat(how(block, captured), policy=policy)
    for _ in range(2):
        step(region)
    left = weakref.ref(block), weakref.ref(captured), weakref.ref(block[0].weight)
    del block, captured, region
    gc.collect()
    assert [ref() for ref in left] == [None] * 3


def test_graphs_hold_no_tensor_no_module_and_no_function_of_the_users():
    graph = Graph(record(of_closure(model(), torch.randn(8)), (X,)))
    seen, todo = set(), [graph]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, torch._ops.OpOverload)):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, (torch.Tensor, torch.nn.Module, types.FunctionType)), thing
        todo += gc.get_referents(thing)
    assert len(seen) > 50


def test_layers_that_are_alike_are_planned_once(traced):
    """The first, whose input is a leaf, is of another kind. Of the others two more are looked at."""
    layers = [remat(model(), policy=checkpoint_policy(budget=0.5)) for _ in range(10)]
    step(torch.nn.Sequential(*layers))
    assert len(traced) == 4
    step(torch.nn.Sequential(*layers), torch.randn(6, 8, requires_grad=True))
    assert len(traced) == 8


@pytest.mark.parametrize("odd", [1, 2, 5])
def test_a_layer_that_only_looks_alike_is_planned_for_itself(odd):
    """By its place: with the third on, the engine sees that a call is not what was planned."""
    order: list[torch.nn.Module] = []

    class Layer(torch.nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            return x.sin().exp() if order.index(self) == odd else x.exp()

    def gradients(wrap):
        torch.manual_seed(0)
        order[:] = [Layer(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(7)]
        x = X
        for layer in order:
            x = wrap(layer)(x)
        return torch.autograd.grad(x.sum(), [p for layer in order for p in layer.parameters()])

    wrap = functools.partial(remat, policy=checkpoint_policy(budget=0.5))
    for _ in range(2):
        same(gradients(wrap), gradients(lambda layer: layer), 0.0)


CHANGES = {
    "a captured number": lambda box: box.update(scale=3.0),
    "a captured flag in a list": lambda box: box["flags"].append(True),
    "another dtype captured": lambda box: box.update(tensor=torch.ones(8, dtype=torch.float64)),
    "another shape captured": lambda box: box.update(tensor=torch.ones(4, 8)),
    "gradient of what is captured": lambda box: box.update(tensor=torch.ones(8, requires_grad=True)),
    "another module": lambda box: box.update(block=model()),
    "training": lambda box: box["block"].eval(),
    "frozen": lambda box: box["block"][0].requires_grad_(False),
    "an attribute of a module": lambda box: setattr(box["block"][1], "slope", 0.5),
    "a hook": lambda box: box["block"][1].register_forward_hook(lambda m, a, out: out * 2),
    "a layer": lambda box: box["block"].append(torch.nn.ReLU()),
    "another function": lambda box: box.update(act=torch.cos),
    "what a table's method reads": lambda box: box["table"].update(n=2.0),
    "a global of the function's file": lambda box: globals().update(FLAG=True),
    "the default dtype": lambda box: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_ops_is_planned_anew(traced, change):
    box = {"block": model(), "scale": 2.0, "flags": [], "tensor": torch.ones(8), "act": torch.sin}
    box["table"] = {"n": 1.0}

    def made():
        block, scale, flags, tensor, act = (box[k] for k in ("block", "scale", "flags", "tensor", "act"))
        get = box["table"].get
        return lambda x: act(block(x) * scale * len([*flags, 1, FLAG]) * get("n") + tensor)

    step(remat(made(), policy=checkpoint_policy(budget=0.5)))
    step(remat(made(), policy=checkpoint_policy(budget=0.5)))
    assert len(traced) == 1
    try:
        CHANGES[change](box)
        assert call_key(made(), (X,), {}) != call_key(lambda x: x, (X,), {})
        step(remat(made(), policy=checkpoint_policy(budget=0.5)))
    finally:
        torch.set_default_dtype(torch.float32)
        globals().update(FLAG=False)
    assert len(traced) == 2


def test_autocast_and_its_dtype_are_in_the_key():
    keys = [call_key(torch.sin, (X,), {})]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(call_key(torch.sin, (X,), {}))
    assert len(set(keys)) == 3


def test_the_same_tensor_twice_is_another_call():
    assert call_key(torch.add, (X, X), {}) != call_key(torch.add, (X, X.clone()), {})
    assert call_key(torch.add, (X, 1), {}) != call_key(torch.add, (X, 1.0), {})
    assert call_key(torch.add, (X, 1), {}) == call_key(torch.add, (X, 1), {})


def test_static_arguments_are_planned_once_each(traced):
    region = remat(
        lambda x, how: x.sin().exp() if how == "exp" else x.cos().exp(),
        policy=checkpoint_policy(budget=0.5),
        static_argnums=1,
    )
    for how in ("exp", "cos", "exp", "cos"):
        step(region, X, how)
    assert len(traced) == 2


class Slotted:
    """Neither a dictionary nor weak references."""

    __slots__ = ("on",)

    def __init__(self):
        self.on = False


def test_an_object_with_slots_is_known_by_what_they_hold(traced):
    thing = Slotted()
    for _ in range(4):
        fn = remat(lambda x: (x.sin() if thing.on else x.cos()).exp(), policy=checkpoint_policy(budget=0.5))
        step(fn)
        thing.on = not thing.on
    assert len(traced) == 2


class Step:
    """What a model makes anew in every step, with a number that counts and what nobody looks into."""

    def __init__(self, number):
        self.number, self.history, self.opaque = number, list(range(number)), object()


PLACES = {
    "attribute": lambda block, thing: (setattr(block, "thing", thing), block)[1],
    "captured": lambda block, thing: lambda x: block(x) if thing else None,
    "in a dict": lambda block, thing: (setattr(block, "things", {"thing": (thing, None)}), block)[1],
}


@pytest.mark.parametrize("place", PLACES)
def test_an_object_made_anew_in_every_step_is_planned_a_few_times(traced, place):
    block = model()
    policy = checkpoint_policy(budget=0.5)
    for number in range(12):
        step(remat(PLACES[place](block, Step(number)), policy=policy))
    assert len(traced) <= 4


def test_an_argument_made_anew_in_every_step_is_planned_a_few_times(traced):
    block = model()
    region = remat(lambda x, thing: block(x), policy=checkpoint_policy(budget=0.5))
    for number in range(12):
        step(lambda x, n=number: region(x, Step(n)))
    assert len(traced) <= 4


@pytest.mark.filterwarnings("error")
def test_a_budget_whose_plan_went_stale_unseen_is_right_and_learns_what_ran(traced):
    """A flag too deep for a key: what the plan does not know is recomputed, once."""
    block, thing = model(), Slotted()
    block.__dict__["thing"] = [[[[[thing]]]]]

    def fn(x):
        x = block(x)
        return x.sin().exp() if block.__dict__["thing"][0][0][0][0][0].on else x.cos().exp()

    policy = checkpoint_policy(budget=0.5)
    region = remat(fn, policy=policy)
    step(region)
    thing.on = True
    x = X.detach().clone().requires_grad_()
    region(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(fn(X).sum(), X)[0])
    step(region)
    assert len(traced) == 1
    learned, looked = policy.bind(fn, (X,), {}).plans  # pyright: ignore[reportAttributeAccessIssue]
    assert "aten.sin.default" in learned.ops and "aten.cos.default" in looked.ops


def test_caches_are_bounded(traced, monkeypatch):
    monkeypatch.setattr(cache, "_SEEN", BoundedCache(4))
    for size in range(1, 10):
        x = torch.ones(size, requires_grad=True)
        step(remat(lambda x: x.sin().exp(), policy=checkpoint_policy(budget=0.5)), x)
    assert len(cache._SEEN) == 4
    graph = next(calls.graph for calls in cache._SEEN.values() if calls.graph)
    for k in range(100):
        BudgetPolicy(budget=4096 + k)._plan(graph, torch.sin)
    assert len(graph.solved) == graph.solved.room < 100


def test_interned_numbers_are_bounded_and_found_while_a_policy_lives():
    first = checkpoint_policy(budget=0.123)
    again = checkpoint_policy(budget=0.123)
    assert first.number == again.number
    for k in range(1100):
        BudgetPolicy(1 + k)
    later = checkpoint_policy(budget=0.123)
    assert later.number != first.number
    number = again.number
    del first
    gc.collect()
    assert registered[number] == again == later


def rule(info):
    return True


def test_a_key_holds_no_rule():
    def made(block):
        return [checkpoint_policy(lambda info: bool(block)), where(lambda info: bool(block))]

    block = model()
    policies = made(block)
    keys = [policy.key for policy in policies]
    left = weakref.ref(block)
    del policies, block
    gc.collect()
    assert left() is None and all(hash(key) == hash(key) for key in keys)


def test_who_is_asked_again():
    asked = checkpoint_policy(rule, stateful=True)
    assert asked.asks_again and repr(asked) == "checkpoint_policy(rule, stateful=True)"
    assert asked.key != checkpoint_policy(rule).key
    assert (asked | save_matmuls).asks_again and (~asked).asks_again and where(rule, asked).asks_again
    for policy in (
        checkpoint_policy(rule),
        save_names("a"),
        save_every_nth(2, save_matmuls),
        BudgetPolicy(0.5),
    ):
        assert not policy.asks_again and not (policy | save_matmuls).asks_again
    with pytest.raises(TypeError, match="only a function is asked more"):
        checkpoint_policy(save_matmuls, stateful=True)


def test_numbered_layers_with_an_iterator_in_reach_are_traced_once(traced):
    """As those of transformers, whose attention knows the number of its layer. What a look would take out of
    an iterator is no reason to trace each of 14 layers for itself."""
    tokens = iter(range(3))

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh() if tokens is not None else x

    layers = torch.nn.Sequential(*[Layer(8, 8) for _ in range(14)])
    for number, layer in enumerate(layers):
        layer.number = number  # pyright: ignore[reportArgumentType]
    nn.apply(layers, layers="*", policy=checkpoint_policy(budget=0.5))
    fit(lambda x: layers(x).sum(), X, budget=0.5)
    # One more kind, of the first one's input; and numbers are trusted from the eighth layer on.
    assert len(traced) == 9 and next(tokens) == 0
