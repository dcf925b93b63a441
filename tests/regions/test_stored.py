"""What a function stores where it does not return it: on modules, in containers, in variables."""

import collections
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from remat import RematError, is_recomputing, remat, save_matmuls, scan_remat
from tests.bank import BANK, subject
from tests.helpers import crossed, rand, same
from tests.ways import check

Pair = collections.namedtuple("Pair", "a b")
LOG: list[torch.Tensor] = []


class Model(torch.nn.Module):
    """`put(self, h)` stores what `get(self)` reads after the region."""

    def __init__(self, around: Any, put: Any, get: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(rand(3, 3, seed=1))
        self.around, self.put, self.get = around, put, get
        self.box: dict[str, Any] = {}
        self.hidden = torch.ones(3, dtype=torch.float64)
        self.register_buffer("buffer", torch.ones(3, dtype=torch.float64))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.w)
        self.put(self, h, x)
        return h * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses: list[torch.Tensor] = []
        self._private: dict[str, Any] = {"last": collections.deque(maxlen=1)}
        LOG.clear()
        out = self.around(self.block)(x)
        return out.sum() + (self.get(self) * x.cos()).sum()


def setting(name: str, made: Any) -> Any:
    return lambda m, h, x: setattr(m, name, made(h, x))


def state(m: Model, h: torch.Tensor, x: torch.Tensor) -> None:
    m.hidden = (h.mean(0) * m.hidden).detach()


def table(m: Model, h: torch.Tensor, x: torch.Tensor) -> None:
    m.table = getattr(m, "table", torch.arange(3.0, dtype=torch.float64).cos())
    m.last = h * m.table


STORES: dict[str, tuple[Any, Any]] = {
    "attribute": (setting("aux", lambda h, x: h.square().mean()), lambda m: m.aux),
    "twice": (lambda m, h, x: setattr(m, "a", h.sin()) or setattr(m, "b", m.a), lambda m: m.a + m.b),
    "result": (setting("aux", lambda h, x: h), lambda m: m.aux.sin()),
    "argument": (setting("aux", lambda h, x: x), lambda m: m.aux.sin()),
    "view": (setting("aux", lambda h, x: h[0]), lambda m: m.aux),
    "weight": (setting("aux", lambda h, x: x.mean(0)), lambda m: m.aux + m.w.sum(0)),
    "list": (lambda m, h, x: m.losses.append(h.square().mean()), lambda m: sum(m.losses)),
    "deque": (lambda m, h, x: m._private["last"].append(h.cos()), lambda m: m._private["last"][0]),
    "buffer": (lambda m, h, x: setattr(m, "buffer", m.buffer + h.detach().mean(0)), lambda m: m.buffer),
    "dict": (lambda m, h, x: m.box.update(a=h.sum()), lambda m: m.box["a"]),
    "made": (setting("box", lambda h, x: {"a": [h.cos(), h]}), lambda m: m.box["a"][0] * m.box["a"][1]),
    "tuple": (setting("aux", lambda h, x: (h.sum(), (h.cos(), 3))), lambda m: m.aux[0] * m.aux[1][0]),
    "namedtuple": (setting("aux", lambda h, x: Pair(h.sum(), h)), lambda m: m.aux.a * m.aux.b),
    "global": (lambda m, h, x: LOG.append(h.square()), lambda m: LOG[0]),
    "detached": (setting("aux", lambda h, x: h.detach() * 2), lambda m: m.aux),
    "mask": (setting("aux", lambda h, x: h > 0), lambda m: m.aux),
    "state": (state, lambda m: m.hidden),
    "table": (table, lambda m: m.table + m.last),
}


def calls(model: Model) -> dict[str, Any]:
    x, w = rand(2, 3), {"w": model.w.detach()}
    xs = torch.stack([x, 2 * x])

    def of(w: Any, x: torch.Tensor) -> Any:
        return functional_call(model, w, (x,))

    return {
        "autograd": lambda: torch.autograd.grad(model(x), (model.w,)),
        "grad": lambda: grad(of)(w, x),
        "vmap(grad)": lambda: vmap(grad(of), (None, 0))(w, xs),
        "vmap": lambda: torch.autograd.grad(vmap(model)(xs).sum(), (model.w,)),
        "jvp": lambda: jvp(lambda x: of(w, x), (x,), (x.cos(),)),
        "jacrev": lambda: jacrev(lambda x: of(w, x))(x),
        "grad(grad)": lambda: grad(lambda w: grad(of)(w, x)["w"].square().sum())(w),
        "hessian": lambda: hessian(lambda x: of(w, x))(x),
    }


# Torch itself dies of a tensor that two levels left behind.
TORCH_DIES = [(store, call) for store in ("state", "table", "buffer") for call in ("grad(grad)", "hessian")]
CALLS = [*calls(Model(None, None, None))]


def alive(stores: Any) -> list[tuple[str, str]]:
    return [(store, call) for store in stores for call in CALLS if (store, call) not in TORCH_DIES]


@pytest.mark.parametrize(("store", "call", "policy"), crossed(STORES, CALLS, [None, save_matmuls], every=13))
def test_a_stored_tensor_has_its_derivatives(store, call, policy):
    if (store, call) in TORCH_DIES:
        pytest.skip("torch dies of it")
    ours = Model(lambda f: remat(f, policy=policy), *STORES[store])
    plain = Model(lambda f: f, *STORES[store])
    for _ in range(2):
        same(calls(ours)[call](), calls(plain)[call]())


def test_a_tensor_is_stored_on_objects_that_a_region_is_given_and_in_variables():
    def value(remat):
        def loss(w):
            given, mine = SimpleNamespace(), torch.zeros(())

            def region(x, given):
                nonlocal mine
                h = (x @ w).tanh()
                given.aux, mine = h.square().sum(), h.cos().sum()
                return h

            return remat(region)(rand(2, 3), given).sum() + given.aux * mine

        return grad(loss)(rand(3, 3, seed=1))

    same(value(remat), value(lambda f: f))


def test_what_a_recomputation_does_not_store_again_is_told_of():
    def loss(w, scale):
        seen = []

        def region(x):
            h = (x @ w).tanh()
            kept = h.view(-1)
            if not is_recomputing():
                seen.append(kept)
            return h.sum()

        return remat(region)(rand(2, 3)) + scale * (seen[0] if scale else seen[0].detach()).sum()

    w = rand(3, 3, seed=1)
    same(grad(loss)(w, 0), grad(lambda w: (rand(2, 3) @ w).tanh().sum())(w))
    same(grad(loss)(w, 1.0), grad(lambda w: (rand(2, 3) @ w).tanh().sum() * 2)(w))
    with pytest.raises(RematError, match="its forward stored 1 tensors .* and its recomputation 0"):
        grad(lambda w: grad(loss)(w, 1.0).sum())(w)


@pytest.mark.parametrize("call", [grad, lambda f: lambda w: jvp(f, (w,), (w,))], ids=["grad", "jvp"])
def test_a_result_stored_in_a_container_among_the_arguments_is_refused_where_levels_nest(call):
    def loss(w, returned=False):
        def region(x, box):
            box["a"] = (x @ w).tanh()
            return box if returned else box["a"].sum()

        box: dict[str, Any] = {"x": 1}
        out = remat(region)(rand(2, 3), box)
        return out["a"].sum() if returned else out + box["a"].sum()

    w = rand(3, 3, seed=1)
    with pytest.raises(RematError, match="stores a result in a dict or list among its arguments"):
        grad(lambda w: grad(lambda w: call(loss)(w)[0].sum())(w).sum())(w)
    for returned in (True, False):
        factor = 1 if returned else 2
        same(
            call(lambda w, returned=returned: loss(w, returned))(w),
            call(lambda w, factor=factor: (rand(2, 3) @ w).tanh().sum() * factor)(w),
        )


def test_a_table_may_be_stored_in_a_container_among_the_arguments():
    def loss(w):
        def region(x, cache):
            cache.setdefault("table", torch.arange(3.0, dtype=torch.float64).cos())
            return ((x @ w) * cache["table"]).tanh().sum()

        return remat(region)(rand(2, 3), {})

    w, table = rand(3, 3, seed=1), torch.arange(3.0, dtype=torch.float64).cos()
    same(grad(loss)(w), grad(lambda w: ((rand(2, 3) @ w) * table).tanh().sum())(w))


def scanned(f: Any) -> Any:
    return lambda x: scan_remat(lambda c, _: (f(c), None), x, length=2)[0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("store", ["attribute", "list", "made", "namedtuple"])
def test_what_a_step_of_a_scan_stores_refuses_derivatives(store, call):
    model = Model(scanned, *STORES[store])
    with pytest.raises(RematError, match="its body stores a tensor"):
        calls(model)[call]()


LEFT = ["attribute", "list", "made", "tuple", "table", "detached"]


@pytest.mark.parametrize("case", alive(LEFT)[::4], ids="-".join)
def test_what_a_step_of_a_scan_stores_may_be_left(case):
    """Nor is a table refused that depends on nothing."""
    store, call = case
    put, _ = STORES[store]
    ours = Model(scanned, put, lambda m: m.w.sum(0))
    plain = Model(lambda f: lambda x: f(f(x)), put, lambda m: m.w.sum(0))
    for _ in range(2):
        same(calls(ours)[call](), calls(plain)[call]())


def test_a_table_stored_under_nested_levels_is_a_number_after_them():
    """Torch's own is a wrapper of levels that are gone, which the next transform refuses."""
    tables: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * tables.setdefault("t", (2 * x).detach())).sin().sum()

    x = rand(3)
    same(jacrev(grad(remat(fn)))(x), torch.diag(-4 * x**2 * (2 * x * x).sin()))
    same(grad(lambda x: (x * tables["t"]).sum())(x), 2 * x)


def test_a_table_that_a_step_caches_may_be_read():
    ours = Model(scanned, table, lambda m: m.table)
    plain = Model(lambda f: lambda x: f(f(x)), table, lambda m: m.table)
    for _ in range(2):
        for call in ("autograd", "grad", "vmap(grad)"):
            same(calls(ours)[call](), calls(plain)[call]())


def test_a_step_of_a_scan_that_reads_what_the_last_one_stored_is_refused_in_forward_mode():
    """The values that tangents go with are evaluated a second time."""
    held = SimpleNamespace(state=torch.ones(3, dtype=torch.float64))

    def step(x):
        held.state = held.state * 2
        return x * held.state

    with pytest.raises(RematError, match="gave other numbers"):
        jvp(scanned(step), (rand(3),), (rand(3),))


@pytest.mark.parametrize("where", ["scan", "loop", "tiles"])
def test_a_result_of_an_earlier_step_that_no_step_of_a_scan_reads(where: str) -> None:
    """Its graph is freed before the scan's backward comes: no backward is led there."""
    program = BANK[f"result_stored_beside_{where}"]
    assert check(subject(program, "nothing"), [{"how": "reversed"}] * 2, torch.float64).kind == "same"


class ReadsItsLast(torch.nn.Module):
    """Stores a result that steps of a scan read after the first, some of them or through what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(rand(3, 3, seed=1))

    last: torch.Tensor

    def late(self, h: torch.Tensor, k: int) -> torch.Tensor:
        return (h @ self.w).tanh() * (self.last if k == 2 else 1.0)

    def viewed(self, h: torch.Tensor, k: int) -> torch.Tensor:
        return (h @ self.w).tanh() + self.last.t().t()[0]

    def returned(self, h: torch.Tensor, k: int) -> torch.Tensor:
        return self.last

    def in_a_region(self, h: torch.Tensor, k: int) -> torch.Tensor:
        return remat(lambda h: (h @ self.w).tanh() * self.last)(h)


@pytest.mark.parametrize("name", ["late", "viewed", "returned", "in_a_region"])
def test_a_result_that_a_step_reads_keeps_its_gradient(name: str) -> None:
    def run(scans: bool) -> list[torch.Tensor]:
        model, x = ReadsItsLast(), rand(2, 3).requires_grad_()
        model.last, model.unread = (x * 2).sin(), x.exp()
        step = getattr(model, name)
        if scans:
            out = scan_remat(lambda c, _: ((step(*c), c[1] + 1), None), (x * 1, 0), length=3)[0][0]
        else:
            out = step(step(step(x * 1, 0), 1), 2)
        return [out, *torch.autograd.grad(out.square().sum(), [x, model.w], allow_unused=True)]

    same([t for t in run(True) if t is not None], [t for t in run(False) if t is not None])


class Early(Exception):
    """Ends a function, with what was made until then."""


LEAVES: dict[str, Any] = {
    "argument": (lambda box, error, h: setattr(error, "args", (h,)), lambda box, error: error.args[0]),
    "attribute": (lambda box, error, h: setattr(error, "made", [h]), lambda box, error: error.made[0]),
    "stored": (lambda box, error, h: setattr(box, "made", h), lambda box, error: box.made),
}


@pytest.mark.parametrize("where", LEAVES)
@pytest.mark.parametrize("way", ["grad", "grad of grad", "scan"])
def test_what_is_left_by_an_exception_has_derivatives_or_refuses_them(where: str, way: str) -> None:
    leave, read = LEAVES[where]

    def loss(x: torch.Tensor, around: Any = lambda f: f) -> torch.Tensor:
        box = SimpleNamespace()

        def ends(x: torch.Tensor) -> torch.Tensor:
            error = Early()
            leave(box, error, x.sin().exp())
            raise error

        try:
            return around(ends)(x)
        except Early as early:
            return (read(box, early).cos() * x).sum()

    once, x = lambda *around: grad(lambda x: loss(x, *around)), rand(3)  # noqa: E731
    if way == "grad":
        same(once(remat)(x), once()(x))
        return
    around, run = remat, lambda *around: grad(lambda x: once(*around)(x).sum())(x)
    if way == "scan":
        around, run = scanned, lambda *around: torch.autograd.grad(loss(x.requires_grad_(), *around), x)
    same(loss(x, around), loss(x))
    with pytest.raises(RematError, match="ended by an exception"):
        run(around)
