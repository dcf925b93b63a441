"""`python -m tests.fuzz.scans`: scans of bodies drawn at random, against the same loop in plain Python.

Bodies have several carries that read each other, each or none of them the rows, so that a gradient comes to a
row or a weight only some steps later, or never. Some pass through. The loss reads a few of the last carries
and of the ys. Each program is differentiated in one way, with steps compiled or not, in blocks of one step or
of four. Some use transforms of `torch.func` inside, of carries, weights and constants. Some scans are loops
of unknown length (`while_remat`), some keep their carries in host memory, and some are no scans but a region
for each step.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, func
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from remat import RematError, remat, save_everything, save_matmuls, save_nothing, scan_remat, while_remat
from tests.bank.library import Doubled, R, on
from tests.compiled import compiled
from tests.helpers import forget, nan_where_nobody_wrote
from tests.scan.inside import entry
from tests.ways import regions

# From a loss and the numbers of its arguments; each vmap has examples of its own.
TRANSFORMS: dict[str, Callable[[Any, tuple[int, ...]], Callable[..., Any]]] = {
    "grad": lambda f, every: grad(f, every),
    "vmap of grad": lambda f, every: vmap(grad(f, every)),
    "vmap of vmap of grad": lambda f, every: vmap(vmap(grad(f, every))),
    "grad of vmap": lambda f, every: grad(lambda *a: vmap(f)(*a).sum(), every),
    "vmap of weights": lambda f, every: vmap(grad(f, every), (0, *(None for _ in every[1:]))),
    "jvp": lambda f, _: lambda *a: jvp(f, a, cosines(a)),
    "vmap of jvp": lambda f, _: vmap(lambda *a: jvp(f, a, cosines(a))),
    "jvp of grad": lambda f, every: lambda *a: jvp(grad(f, every), a, cosines(a)),
    "vmap of jvp of grad": lambda f, every: vmap(lambda *a: jvp(grad(f, every), a, cosines(a))),
    "grad of jvp": lambda f, every: grad(lambda *a: jvp(f, a, cosines(a))[1], every),
    "grad of grad": lambda f, every: grad(lambda *a: along(grad(f, every)(*a), a), every),
    "jacrev of grad": lambda f, _: jacrev(grad(f)),
    "jacfwd": lambda f, every: jacfwd(f, every),
}
EAGER = ("backward", "second", "in a region", *TRANSFORMS)
# Compiled steps draw other numbers than the loop, and transforms of them in another order.
DRAWS = ("backward", "second", "in a region")
COMPILED = ("steps", "compiled", "compiled grad", "compiled vmap of grad")
POLICIES = {"nothing": save_nothing, "matmuls": save_matmuls, "everything": save_everything}
WIDTH = 3
# Transforms inside a step, by what they differentiate or batch; K is a constant that a step captures.
INNER = (
    "func.grad(lambda t: (t.sin() * {b} + (t @ {w}).cos()).sum())({a})",
    "func.grad(lambda t: (t * {a}.sin() + t.sin() * {b}.cos()).square().sum())(K)",
    "func.grad(lambda p: ({a} @ p['w']).tanh().sum())(dict(w={w}))['w'].sum(0) * {b}",
    "func.vjp(lambda t: (t @ {w}).sin(), {a})[1]({b})[0]",
    "func.vjp(lambda t: (t * {a}).sin(), K)[1]({b})[0]",
    "func.jacrev(lambda t: (t * {b}).sin())({a}).sum((0, 1))",
    "func.jacrev(lambda t: (t * {b}).sin())(K).sum((0, 1)) * {a}",
    "func.jacfwd(lambda t: (t * {b}).sin())({a}).sum((0, 1))",
    "func.jacfwd(lambda t: (t * {b}).sin())(K).sum((0, 1)) * {a}",
    "func.jvp(lambda t: (t @ {w}).tanh(), ({a},), ({b},))[1]",
    "func.jvp(lambda t: (t * {a}).tanh(), (K,), (K,))[1] * {b}",
    "func.vmap(lambda t, u: (t @ {w} * u).tanh())({a}, {b})",
    "func.vmap(lambda t: (t * {a}).sin().sum(0))(K) * {b}",
    "func.vmap(func.grad(lambda t, u: (t.sin() * u).sum()), (0, None))({a}, {b}[0])",
    "func.hessian(lambda t: (t.sin() * {b}.cos()).square().sum())({a}).sum((0, 1))",
)
FORWARD = re.compile("jvp|jacfwd|hessian")


def force(a: Tensor, b: Tensor) -> Tensor:
    """By plain autograd."""
    with torch.enable_grad():
        own = a.detach().requires_grad_()
        return torch.autograd.grad((own.sin() * b.detach()).sum(), own)[0] * b


def written(a: Tensor, b: Tensor) -> Tensor:
    made = a.sin()
    made[:, 0] = b[:, 1] * a[:, 2]
    made[0].mul_(2).add_(b[1])
    return made.view(-1)[1:].mul_(0.5).cos().sum() + made


def turned(a: Tensor, b: Tensor) -> Tensor:
    """Through complex numbers."""
    return (torch.complex(a, b) * torch.complex(b, a.sin())).imag.tanh()


def picked(a: Tensor, b: Tensor) -> Tensor:
    """By decisions."""
    best = a.argmax(1, keepdim=True)
    return torch.where(a > b, a.sin(), b * 0.5) + b.gather(1, best) + torch.sort(a, 1)[0].cos()


def within(a: Tensor, b: Tensor) -> Tensor:
    """By a scan inside."""
    if not on[0]:
        for row in b.unbind():
            a = (a * row).sin() + 0.5 * a
        return a
    return scan_remat(lambda c, x: ((c * x).sin() + 0.5 * c, None), a, b)[0]


def apart(a: Tensor, b: Tensor) -> Tensor:
    """By a region inside."""
    inner = lambda a, b: (a.tanh() @ b.T) @ b.sin()  # noqa: E731
    return R(inner, "matmuls")(a, b).tanh()


def cut(a: Tensor, b: Tensor) -> Tensor:
    """With parts that no gradient passes."""
    with torch.no_grad():
        scale = a.cos() + 2
    return a / scale + b.detach().sin() * a


def chosen(a: Tensor, b: Tensor) -> Tensor:
    """By `autograd.Function`, and what forgets its own results."""
    parts = torch.cat([Doubled.apply(a), b], 1).split(WIDTH, 1)
    return parts[0] * parts[1].unsqueeze(0).expand(1, -1, -1)[0]


HELPERS = (written, turned, picked, within, apart, cut, chosen)


def cosines(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A direction."""
    return tuple(a.detach().cos() for a in args)


def along(gradients: Sequence[Tensor], args: Sequence[Tensor]) -> Tensor:
    """The gradients' sum in that direction."""
    return torch.stack([(g * c).sum() for g, c in zip(gradients, cosines(args), strict=True)]).sum()


class Case:
    """The program of a number."""

    def __init__(self, seed: int, ways: Sequence[str], backend: str = "aot_eager") -> None:
        dice = self.dice = random.Random(f"scan{seed}")
        self.backend = backend
        self.seed, self.way = seed, dice.choice(ways)
        self.carries = dice.choice([0, *range(1, 5), *range(1, 5)])
        # Without a carry it maps its rows.
        least = int(not self.carries)
        self.rows, self.ys, self.consts = dice.randint(least, 2), dice.randint(least, 2), dice.randint(1, 2)
        self.length, self.block = dice.choice([1, 2, 3, 4, 5, 8, 9]), dice.choice([1, 4])
        self.reverse, self.policy = dice.random() < 0.3, dice.choice(list(POLICIES))
        self.checkpoints = dice.choice(["all", "sqrt", "sqrt", dice.randint(1, 3)])
        self.loops = not (self.rows or self.ys) and self.way in EAGER
        self.offload = dice.random() < 0.2 and not self.loops
        self.regions = dice.random() < 0.3 and self.way != "steps"
        values = [f"c{i}" for i in range(self.carries)]
        inputs = [*values, *(f"x{i}" for i in range(self.rows))]
        self.body = [self.term(inputs, values[i]) for i in range(self.carries)]
        self.out = [self.term([*inputs, *(f"n{i}" for i in range(self.carries))]) for _ in range(self.ys)]
        results = [*(f"c{i}" for i in range(self.carries)), *(f"y{i}" for i in range(self.ys))]
        self.read = dice.sample(results, dice.randint(1, len(results)))
        self.edge = dice.choice(["all", "all", "first", "last"])  # which rows of the ys

    def term(self, inputs: list[str], own: str = "") -> str:
        """What a carry becomes, or a y is: an expression of carries, rows and weights."""
        dice, kinds = self.dice, ["mix", "mix", "product", "gate", "alone"]
        kinds += ["drop"] * (self.way in DRAWS) + ["inner", "helper"]
        kind = dice.choice([*kinds, "same", "move"] if own else kinds)
        a, b = dice.choice(inputs), dice.choice(inputs)
        w = f"w{dice.randrange(self.consts)}"
        # All of a carry is batched, and what `written` makes may not be (docs/limits.md). Dynamo traces no
        # `jvp` of the user's.
        barred = {written: self.way == "vmap of weights", chosen: self.way in COMPILED}
        helpers = [f for f in (*HELPERS, *[force] * (self.way in DRAWS)) if not barred.get(f)]
        # Where Dynamo does not trace forward mode inside vmap, it leaves a level open.
        inner = [t for t in INNER if self.way in EAGER or not FORWARD.search(t)]
        return {
            "mix": f"({own or a} * 0.5 + {b}.sin())",
            "product": f"torch.tanh({a} @ {w} + {own or b})",
            "gate": f"({a}.sigmoid() * {b})",
            "alone": f"{a}.cos()",
            "drop": f"torch.nn.functional.dropout({a}, 0.5)",
            "inner": dice.choice(inner).format(a=a, b=b, w=w),
            "helper": f"{dice.choice(helpers).__name__}({a}, {b})",
            "same": own,  # passes through
            "move": a,  # another one's value, one step later
        }[kind]

    def __str__(self) -> str:
        steps = f"{self.length} steps, blocks of {self.block}, {self.checkpoints}, {self.policy}"
        body = ", ".join([*self.body, *self.out])
        flags = "".join(
            f", {flag}" for flag in ("reverse", "loops", "offload", "regions") if getattr(self, flag)
        )
        return f"seed {self.seed}: {self.way}, {steps}{flags}: {body} -> {self.edge} of {self.read}"

    def arguments(self) -> list[Tensor]:
        """Weights, first carries, rows."""
        make = torch.Generator().manual_seed(self.seed)
        shapes = [(WIDTH, WIDTH)] * self.consts + [(2, WIDTH)] * self.carries
        shapes += [(self.length, 2, WIDTH)] * self.rows
        return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]

    def make(self) -> Callable[[Sequence[Tensor]], Callable[[Any, Any], Any]]:
        """What makes the body of weights, which it then has in its closure."""
        names = lambda letter, count: "".join(f"{letter}{i}, " for i in range(count))  # noqa: E731
        lines = [f"n{i} = {term}" for i, term in enumerate(self.body)]
        lines += [f"y{i} = {term}" for i, term in enumerate(self.out)]
        source = f"""
def make(weights, K):
    {names("w", self.consts)} = weights
    def body(carry, x):
        {names("c", self.carries) or "_"} = carry
        {names("x", self.rows) or "_"} = x
        {"; ".join(lines)}
        return ({names("n", self.carries)}), ({names("y", self.ys)})
    return body
"""
        constant = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)
        found: dict[str, Any] = {"__name__": __name__, "torch": torch, "func": func}
        found |= {helper.__name__: helper for helper in (*HELPERS, force)}
        exec(source, found)
        return partial(found["make"], K=constant)

    def loss(self, scan: Callable[..., Any]) -> Callable[..., Tensor]:
        """Of weights, first carries and rows; `scan(body, carry, xs)` is a scan or a loop."""
        make = self.make()

        def loss(*args: Tensor) -> Tensor:
            init = args[self.consts : self.consts + self.carries]
            xs = args[self.consts + self.carries :]
            end, ys = scan(make(args[: self.consts]), tuple(init), tuple(xs) or None)
            rows = {"all": slice(None), "first": 0, "last": -1}[self.edge]
            named = {f"c{i}": c for i, c in enumerate(end)} | {f"y{i}": y[rows] for i, y in enumerate(ys)}
            # Everything is read: torch.func and autograd then agree on what is zero.
            total = torch.stack([(a * 0).sum() for a in args]).sum()
            for k, name in enumerate(self.read, 1):
                total = total + (named[name].square() * k).sum()
            return total

        return loss

    def loop(self, body: Any, carry: Any, xs: Any) -> Any:
        steps, ys = list(range(self.length)), {}
        for k in reversed(steps) if self.reverse else steps:
            carry, ys[k] = body(carry, None if xs is None else tuple(x[k] for x in xs))
        return carry, tuple(torch.stack([ys[k][i] for k in steps]) for i in range(self.ys))

    def scan(self, body: Any, carry: Any, xs: Any) -> Any:
        if self.regions:
            return self.loop(remat(body, policy=POLICIES[self.policy]), carry, xs)
        if self.loops:
            again = lambda c: (body(c[0], None)[0], c[1] + 1)  # noqa: E731
            kept = self.checkpoints if isinstance(self.checkpoints, int) else 2
            return while_remat(lambda c: c[1] < self.length, again, (carry, 0), checkpoints=kept)[0], ()
        options: dict[str, Any] = {"checkpoints": self.checkpoints, "policy": POLICIES[self.policy]}
        options["offload"] = self.offload
        if self.way == "steps":
            options["compile"] = self.backend
        return scan_remat(body, carry, xs, length=self.length, reverse=self.reverse, **options)

    def derivatives(self, scan: Callable[..., Any], compile: bool) -> Any:
        """The value and its derivatives, as the program's way says."""
        loss, args, way = self.loss(scan), self.arguments(), self.way.removeprefix("compiled ")
        torch.manual_seed(self.seed)
        torch._dynamo.reset()
        wrapped = compile and self.way.startswith("compiled")
        wrap = partial(compiled, backend=self.backend) if wrapped else lambda fn: fn
        if way == "in a region" and compile:
            loss = remat(loss, policy=POLICIES[self.policy])
        if way in TRANSFORMS:
            batched = 1 if way.endswith("weights") else len(args)
            for _ in range(way.count("vmap")):
                args[:batched] = [torch.stack([a, a.flip(0)]) for a in args[:batched]]
            return wrap(TRANSFORMS[way](loss, tuple(range(len(args)))))(*args)
        for a in args:
            a.requires_grad_()
        value = wrap(loss)(*args)
        first = torch.autograd.grad(value, args, create_graph=way == "second")
        if way != "second":
            return value.detach(), first
        return first, torch.autograd.grad(along(first, args), args, allow_unused=True, materialize_grads=True)

    def fails_alone(self) -> bool:
        """Whether torch does not take the loop either."""
        try:
            with regions(False):
                for compile in (False, True):
                    self.derivatives(self.loop, compile)
        except Exception:
            return True
        return False

    def off(self) -> float:
        """How far the derivatives are from the loop's, by the largest entry."""
        forget()
        before, entry.BLOCK = entry.BLOCK, self.block
        try:
            got = self.derivatives(self.scan, True)
        finally:
            entry.BLOCK = before
        with regions(False):
            pairs = zip(tree_leaves(got), tree_leaves(self.derivatives(self.loop, False)), strict=True)
        return max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs)


def differ(seeds: range, ways: Sequence[str], backend: str = "aot_eager") -> tuple[Counter[str], list[str]]:
    """How many programs came out the same, were refused or not; and those that were not."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    for seed in seeds:
        case = Case(seed, ways, backend)
        try:
            with nan_where_nobody_wrote(backend):
                off = case.off()
        except RematError as error:
            counts["refused"] += 1
            found.append(f"{case}\n    {str(error)[:200]}")
            continue
        except Exception as error:
            if case.fails_alone():
                counts["invalid"] += 1
                continue
            counts["failed"] += 1
            found.append(f"{case}\n    {type(error).__name__}: {str(error)[:200]}")
            continue
        counts["same" if off < 1e-9 else "WRONG"] += 1
        if not off < 1e-9:
            found.append(f"{case}\n    off by {off:.3g}")
    return counts, found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.scans", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last")
    parser.add_argument("--ways", default=",".join(EAGER), help=f"of {', '.join((*EAGER, *COMPILED))}")
    parser.add_argument("--backend", default="aot_eager", help="of the compiled ways: aot_eager, inductor")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    total: Counter[str] = Counter()
    for seed in range(*map(int, options.seeds.split(":"))):
        counts, found = differ(range(seed, seed + 1), options.ways.split(","), options.backend)
        total += counts
        if found:
            print(*found, flush=True)
    print(dict(total))
    return int(total["same"] + total["invalid"] < total.total())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
