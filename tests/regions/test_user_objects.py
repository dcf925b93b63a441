"""Objects of the user's that a region meets: plain torch asks none of their methods, and so does no region.

Kinds of objects x places that a region finds them in x ways to differentiate it, each as a first and as a
second call, equal to the function without regions.
"""

import collections
import dataclasses
import enum
import functools
import types
import weakref

import pytest
import torch
from torch.func import grad, jvp, vmap

import remat
from remat import checkpoint_policy, save_matmuls
from tests.helpers import crossed, same

CALLED: list[str] = []


def _raising(name):
    def method(*args, **kwargs):
        CALLED.append(name)
        raise RuntimeError(f"{name} was called")

    return method


# All that Python asks by itself, but what makes and frees an object. Modules and functions of the tests
# set and read attributes by `object`.
ASKED = """
    len iter next getitem setitem delitem contains bool repr str bytes format hash eq ne lt le gt ge getattr
    getattribute setattr delattr dir call add radd sub mul matmul index int float complex round enter exit get
    reduce reduce_ex getstate setstate copy deepcopy sizeof instancecheck subclasscheck class_getitem
    length_hint reversed missing array array_interface torch_function torch_dispatch fspath
""".split()
HOSTILE: dict = {f"__{name}__": _raising(name) for name in ASKED}
HOSTILE |= {
    name: _raising(name) for name in ("keys", "values", "items", "_fields", "_asdict", "to", "modules")
}
HOSTILE["__class__"] = property(_raising("class"))


class Lying:
    """Says that it is a tensor."""

    @property
    def __class__(self):
        return torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    scale: float = 1.5


@dataclasses.dataclass
class Loose:
    scale: float = 1.5
    more: dict = dataclasses.field(default_factory=lambda: {"a": [1, 2]})


class Arrays:
    def __eq__(self, other):
        return torch.ones(3)

    __hash__ = None  # type: ignore[assignment]


class Anything:
    def __getattr__(self, name):
        raise KeyError(name)


class Irrep(collections.namedtuple("Irrep", "mul l")):
    def __new__(cls, text):
        mul, degree = text.split("x")
        return super().__new__(cls, int(mul), degree)


class Counted(collections.Counter):
    def __init__(self, text):
        CALLED.append("init") if text != "made" else None
        super().__init__("aab")


class Ordered(collections.OrderedDict):
    def __init__(self, *, of):
        super().__init__(a=of)

    __iter__ = keys = values = items = _raising("iteration")


class Irreps(tuple):
    __len__ = __iter__ = _raising("length")


class Mode(enum.Enum):
    ON = 1


class Level(enum.IntEnum):
    HIGH = 3


class Held:
    pass


HELD = Held()


def _hostile(*bases):
    # With slots the object has no `__dict__` of its own unless a base brings one.
    return type("Hostile", bases or (object,), dict(HOSTILE))


def _cycle():
    found: list = [1.5]
    found.append(found)
    return found


def _chain():
    found = None
    for _ in range(3000):
        found = [found]
    return found


def _filled_hostile():
    made = object.__new__(_hostile())
    object.__setattr__(made, "inner", [object.__new__(_hostile(Loose))])
    return made


KINDS = {
    "object": _filled_hostile,
    "dict": lambda: dict.__new__(_hostile(dict)),
    "list": lambda: list.__new__(_hostile(list)),
    "tuple": lambda: tuple.__new__(_hostile(tuple), (1, 2)),
    "set": lambda: set.__new__(_hostile(set)),
    "int": lambda: int.__new__(_hostile(int), 3),
    "str": lambda: str.__new__(_hostile(str), "a"),
    "ordered dict": lambda: collections.OrderedDict.__new__(_hostile(collections.OrderedDict)),
    "deque": lambda: collections.deque.__new__(_hostile(collections.deque)),
    "named tuple": lambda: tuple.__new__(_hostile(collections.namedtuple("Pair", "a b")), (1, 2)),
    "partial": lambda: functools.partial.__new__(
        type(
            "P", (functools.partial,), {"__call__": HOSTILE["__call__"], "func": property(_raising("func"))}
        ),
        len,
    ),
    "lying": lambda: Lying(),
    "frozen": lambda: Frozen(),
    "dataclass": lambda: Loose(),
    "arrays": lambda: Arrays(),
    "getattr": lambda: Anything(),
    "irrep": lambda: Irrep("2x1o"),
    "counter": lambda: Counted("made"),
    "ordered": lambda: Ordered(of=3),
    "irreps": lambda: Irreps((4, 4)),
    "user dict": lambda: collections.UserDict(a=1),
    "default dict": lambda: collections.defaultdict(list, a=[1]),
    "proxy": lambda: types.MappingProxyType({"a": 1}),
    "weak proxy": lambda: weakref.proxy(HELD),
    "dead proxy": lambda: weakref.proxy(Held()),
    "enum": lambda: Mode.ON,
    "int enum": lambda: Level.HIGH,
    "cycle": _cycle,
    "chain": _chain,
}

W = torch.randn(3, 3, dtype=torch.float64)


class Holder(torch.nn.Module):
    def __init__(self, thing):
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())
        # Torch's own `__setattr__` asks what it is given.
        self.__dict__["thing"] = self.__dict__["_private"] = thing

    def forward(self, x):
        return torch.tanh(x @ self.w)


def as_argument(wrap, thing):
    region = wrap(lambda x, thing, *, other=None: torch.tanh(x @ W).exp())
    return lambda x: region(x, thing, other=thing)


def as_nested(wrap, thing):
    region = wrap(lambda x, box: torch.tanh(box["x"][0] @ W).exp())
    return lambda x: region(x, {"x": [x, (thing,)], "thing": thing})


def as_captured(wrap, thing):
    box = [thing]
    return wrap(lambda x: torch.tanh(x @ W).exp() if thing is box[0] else x)


def as_attribute(wrap, thing):
    return wrap(Holder(thing))


def as_result(wrap, thing):
    region = wrap(lambda x: (torch.tanh(x @ W).exp(), thing, [thing]))

    def run(x):
        made, one, (other,) = region(x)
        # A list is built anew under torch.func, as arguments are in JAX.
        assert type(one) is type(other) is type(thing)
        assert one is thing or type(one) in (list, collections.defaultdict) or issubclass(type(one), tuple)
        return made

    return run


PLACES = {f.__name__[3:]: f for f in (as_argument, as_nested, as_captured, as_attribute, as_result)}

WAYS = {
    "backward": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vmap(grad)": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, 2 * x])),
    "grad(grad)": lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).square().sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
}
POLICIES = {"nothing": None, "matmuls": save_matmuls, "budget": checkpoint_policy(budget=0.5)}


@pytest.mark.filterwarnings("ignore:A budget")  # it is below the least that so small a region keeps
@pytest.mark.parametrize(("kind", "place", "way", "policy"), crossed(KINDS, PLACES, WAYS, POLICIES, every=19))
def test_none_of_its_methods_is_called(kind, place, way, policy):
    x = torch.randn(2, 3, dtype=torch.float64)
    thing = KINDS[kind]()
    want = WAYS[way](PLACES[place](lambda f: f, thing), x.clone())
    CALLED.clear()
    region = PLACES[place](lambda f: remat.remat(f, policy=POLICIES[policy]), thing)
    for _ in range(2):
        same(WAYS[way](region, x.clone()), want)
    assert CALLED == []


class Scaled(collections.namedtuple("Scaled", "x scale")):
    """A named tuple with a constructor and an attribute of its own, around a tensor."""

    def __new__(cls, x):
        made = super().__new__(cls, x, 2.0)
        made.note = "mine"  # type: ignore[attr-defined]
        return made


@pytest.mark.parametrize("way", WAYS)
def test_a_named_tuple_with_a_tensor_keeps_its_class_and_its_attributes(way):
    def fn(given):
        assert type(given) is Scaled and given.note == "mine"  # type: ignore[attr-defined]
        return torch.tanh(given.x @ W) * given.scale

    x = torch.randn(2, 3, dtype=torch.float64)
    want = WAYS[way](lambda x: fn(Scaled(x)), x.clone())
    region = remat.remat(fn)
    for _ in range(2):
        same(WAYS[way](lambda x: region(Scaled(x)), x.clone()), want)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((3,), 1.5, dtype=torch.float64))
        self.inner = torch.nn.Linear(3, 3).double()

    def forward(self, x):
        return torch.tanh(self.inner(x) @ self.w) * self.scale


def traced(net):
    return torch.jit.trace(net, torch.randn(2, 3, dtype=torch.float64))


SCRIPTED = {
    "script": torch.jit.script,
    "trace": traced,
    "freeze": lambda net: torch.jit.freeze(torch.jit.script(net.eval())),
    "in a module": lambda net: torch.nn.Sequential(torch.nn.Identity(), traced(net)),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore")  # a budget cannot look into all of these
@pytest.mark.parametrize(("kind", "way", "policy"), crossed(SCRIPTED, WAYS, POLICIES, every=2))
def test_modules_of_torchscript(kind, way, policy):
    # Compared with the module before it was scripted: torch's own jvp and grad(grad) of a scripted one are 0
    # from the second call, when torch has optimized it. A look of the planner is such a call.
    if (kind, way, policy) == ("script", "vmap(grad)", "budget"):
        pytest.skip("torch's own optimized code refuses vmap (docs/limits.md)")
    if (kind, way, policy) == ("script", "jvp", "budget"):
        pytest.skip("torch's own value is 0")
    eager, x = Net(), torch.randn(2, 3, dtype=torch.float64)
    want = WAYS[way](eager, x.clone())
    net = SCRIPTED[kind](eager)
    for wrapped in (net, lambda x: net(x)):
        region = remat.remat(wrapped, policy=POLICIES[policy])
        for _ in range(3):
            same(WAYS[way](region, x.clone()), want)


@pytest.mark.parametrize("kind", ["script", "trace", "in a module"])
def test_parameters_of_torchscript_have_their_derivatives_outside_of_a_level(kind):
    eager, x = Net(), torch.randn(2, 3, dtype=torch.float64)

    def step(f, parameters):
        force = grad(lambda x: f(x).square().sum())(x)
        return torch.autograd.grad(force.square().sum(), parameters)

    want, net = step(eager, list(eager.parameters())), SCRIPTED[kind](eager)
    region, given = remat.remat(lambda x: net(x)), list(net.parameters())
    for _ in range(2):
        same(step(region, given), want)
    assert all(a is b for a, b in zip(net.parameters(), given, strict=True))


@pytest.mark.parametrize("kind", SCRIPTED)
def test_modules_of_torchscript_in_a_transform_in_a_loop(kind):
    """Second derivatives of later calls, which torch's optimized code has wrong."""
    eager, x = Net(), torch.randn(2, 3, dtype=torch.float64)

    def loss(f, x):
        force = grad(lambda x: remat.remat(lambda x: f(x) * x, policy=POLICIES["matmuls"])(x).sum())
        return remat.while_remat(
            lambda c: c[1] < 2, lambda c: (force(c[0]), c[1] + 1), (x, 0), checkpoints=2, max_steps=5
        )[0].sum()

    want, net = grad(lambda x: loss(eager, x))(x), SCRIPTED[kind](eager)
    for _ in range(3):
        same(grad(lambda x: loss(net, x))(x), want)


class Loop(torch.nn.Module):
    """A layer that is called twice, in a scan or not."""

    def __init__(self, layer, scans):
        super().__init__()
        self.layer, self.scans = layer, scans

    def forward(self, x):
        if not self.scans:
            return self.layer(self.layer(x))
        return remat.scan_remat(lambda h, _: (self.layer(h), None), x, length=2)[0]


@pytest.mark.parametrize("levels", [1, 2])
def test_a_module_of_torchscript_in_a_scan(levels):
    """Its weights are operands below the levels, where it reads them past substitutions."""
    layer = torch.nn.Linear(3, 3)
    weights = {f"layer.{name}": t.detach() for name, t in layer.named_parameters()}

    def derivatives(loop):
        once = grad(lambda w: torch.func.functional_call(loop, w, (torch.ones(2, 3),)).sin().sum())
        if levels == 1:
            return once(weights)
        return grad(lambda w: once(w)["layer.weight"].square().sum())(weights)

    same(derivatives(Loop(torch.jit.script(layer), True)), derivatives(Loop(layer, False)), 1e-5)
