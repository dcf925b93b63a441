"""Programs drawn at random: a model of statements, regions and branches, and the calls made of it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.bank import BANK
from tests.bank.library import FEATURES, PLANNED, POLICIES
from tests.ways import DEFAULTS

# How a region is called with two values, and how its function takes them.
CALLS = {
    "plain": ("{x}, {y}", "", "R({f}, {p})({a}, {b})"),
    "same": ("{x}, {y}", "", "R({f}, {p})({a}, {a})"),
    "keyword": ("{x}, *, {y}", "", "R({f}, {p})({a}, {y}={b})"),
    "list": ("pair", "{x}, {y} = pair", "R({f}, {p})([{a}, {b}])"),
    "dict": ("both, flag=None", '{x}, {y} = both["x"], both["y"][0]', "R({f}, {p})(dict(x={a}, y=({b}, 3)))"),
    "closure": ("", "{x}, {y} = {a}, {b}", "R({f}, {p})()"),
    "partial": ("{x}, {y}", "", "R(functools.partial({f}, {y}={b}), {p})({a})"),
    "static": ("{x}, {y}, times, mode", "{x} = {x} * times", 'R({f}, {p})({a}, {b}, 1.5, "mode")'),
    "default": ("{x}, {y}={b}", "", "R({f}, {p})({a})"),
}
FUNCTIONAL_CALLS = {
    "vmapped": ("torch.func.vmap(R({f}, {p}))(torch.stack([{a}, {b}]), torch.stack([{b}, {b}]))", ".sum(0)"),
    "func_grad": ("torch.func.grad(lambda {x}: R({f}, {p})({x}, {b}).sum())({a})", ""),
    "jvp": ("torch.func.jvp(lambda {x}: R({f}, {p})({x}, {b}), ({a},), ({b},))[1]", ""),
    "twice": ("R({f}, {p})(R({f}, {p})({a}, {b}), {b})", ""),
    "scan": ("SCAN(lambda h: {f}(h, {b}), {a}, 2, 1, {p})", ""),
    "loop": ("LOOP(lambda h: R({f}, {p})(h, {b}), {a}, 2)", ""),
}
# What a region's function returns of its last values, and what is made of it.
RETURNS = {
    "single": ("{r}", "{c}"),
    "tuple": ("{r}, {s}", "add({c})"),
    "twice": ("{r}, {r}", "add({c})"),
    "view": ("{r}, {r}[0]", "add({c})"),
    "views": ("{r}[:, :2], {r}[:, 2:]", "torch.cat({c}, 1)"),
    "argument": ("{x}, {r}", "add({c})"),
    "dict": ("dict(h={r}, n=3, none=None)", '{c}["h"]'),
    "nested": ('[{r}, ({s}, "text")]', "add([{c}[0], {c}[1][0]])"),
    "named": ("Pair({r}, {s})", "{c}.second + {c}.first"),
    "detached": ("{r}.detach(), {r}", "add({c})"),
    "transposed": ("{r}.t()", "{c}.t()"),
    "written": ("{r} * 1", "{c}.add_(1)"),
    "unused": ("{r}, {s}", "{c}[0]"),
}


@dataclass
class Statement:
    """What makes one value `out` of the values `ins`: a word, a region or a branch with statements inside."""

    out: str
    ins: tuple[str, str]
    word: str = ""
    body: list[Statement] = field(default_factory=list)
    kind: str = "word"  # word, region, branch
    call: str = "plain"
    returns: str = "single"
    policy: str = "nothing"
    flag: str = "on0"
    method: bool = False
    results: tuple[str, str] = ("", "")

    def lines(self, methods: list[str]) -> Iterator[str]:
        """Its lines of source; methods that it calls are added to `methods`."""
        names = {"o": self.out, "a": self.ins[0], "b": self.ins[1]}
        if self.kind == "word":
            yield from fill(self.word, names | {"t": f"t{self.out[1:]}"}).split("\n")
        elif self.kind == "branch":
            yield f"{self.out} = {self.ins[0]}"
            yield f"if self.{self.flag}:"
            for statement in self.body:
                yield from indented(statement.lines(methods))
            yield f"    {self.out} = {self.results[0]}"
        else:
            yield from self._region(names, methods)

    def _compares(self) -> bool:
        """Whether anything in its body asks if one of its tensors is the other."""
        return any("if {a} is {b}" in statement.word or statement._compares() for statement in self.body)

    def _region(self, names: dict[str, str], methods: list[str]) -> Iterator[str]:
        number = self.out[1:]
        name, extra = f"region{number}", ""
        names |= {"x": f"a{number}", "y": f"b{number}"}
        if self.call in CALLS:
            parameters, first, call = CALLS[self.call]
        else:
            (call, extra), parameters, first = FUNCTIONAL_CALLS[self.call], "{x}, {y}", ""
        returned, made = RETURNS[self.returns]
        inside = [] if not first else [fill(first, names)]
        for statement in self.body:
            inside += statement.lines(methods)
        inside.append("return " + fill(returned, names | {"r": self.results[0], "s": self.results[1]}))
        method = self.method and self.call not in ("closure", "default")
        head = f"def {name}({'self, ' * method}{fill(parameters, names)}):".replace("self, )", "self)")
        source = [head, *indented(inside)]
        if method:
            methods += ["", *indented(source)]
        else:
            yield from source
        if self.call in ("scan", "loop") and self._compares():
            # The first step may not be given what it captures: a known limit (docs/limits.md).
            names["a"] = f"1 * {names['a']}"
        called = fill(call, names | {"f": "self." * method + name, "p": f'"{self.policy}"'}) + extra
        if made.count("{c}") > 1:
            yield f"r{number} = {called}"
            called = f"r{number}"
        yield f"{self.out} = " + fill(made, {"c": called})


@dataclass
class Program:
    """A model and the calls made of it."""

    seed: int
    flavour: str
    body: list[Statement]
    result: str
    steps: list[dict[str, Any]]
    dtype: str = "float64"

    def source(self) -> str:
        """The model as Python source: a class `Model`."""
        methods: list[str] = []
        forward: list[str] = []
        for statement in self.body:
            forward += statement.lines(methods)
        text = "\n".join([*forward, *methods])
        init = [FEATURES[name] for name in FEATURES if re.search(rf"\bself\.{name}\b", text)]
        init = list(dict.fromkeys(line for lines in init for line in lines.split("\n")))
        head = ["class Model(Base):"]
        if init:
            head += ["    def __init__(self):", *indented(indented(["super().__init__()", *init])), ""]
        run = ["def forward(self, x, y):", *indented([*forward, f"return {self.result}"])]
        lines = [*head, *indented(run), *methods]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    @property
    def plans(self) -> bool:
        """Whether a region of it has a budget, which takes longest."""
        return any(body[at].policy in PLANNED for body, at in self.statements())

    def statements(self) -> Iterator[tuple[list[Statement], int]]:
        """Every statement with the list that it stands in, the innermost first."""
        yield from _walk(self.body)


def _walk(body: list[Statement]) -> Iterator[tuple[list[Statement], int]]:
    for at in reversed(range(len(body))):
        yield from _walk(body[at].body)
        yield body, at


def fill(template: str, names: dict[str, str]) -> str:
    return re.sub(r"\{(\w)\}", lambda found: names.get(found[1], found[0]), template)


def indented(lines: Any) -> list[str]:
    return ["    " + line for line in lines]


# -- drawing ---------------------------------------------------------------------------------------------

KINDS = (
    "PURE", "FUNCTIONS", "WRITES", "BUFFERS", "RANDOM", "COMMON", "NESTED", "LEVELS", "OLD", "MEMORY",
    "STATE", "EAGER", "PYTHON", "OPEN", "REFUSED", "OBJECTS", "GENERATORS", "INNER",
)  # fmt: skip
WORDS = {kind: [p.statement() for p in BANK.values() if p.kind == kind] for kind in KINDS}
# Kinds of words, and how often each is drawn: by flavour, and by what its ways of calling can run.
_EAGER = {
    "PURE": 28,
    "FUNCTIONS": 2,
    "WRITES": 18,
    "BUFFERS": 10,
    "RANDOM": 8,
    "COMMON": 7,
    "LEVELS": 8,
    "OLD": 4,
    "EAGER": 4,
}
_FUNC = {"PURE": 38, "FUNCTIONS": 4, "WRITES": 16, "RANDOM": 10, "COMMON": 14, "NESTED": 4}
CHANCES = {
    "eager": _EAGER | {"STATE": 6, "PYTHON": 8, "REFUSED": 0.2},
    # A function that runs again changes Python's state again.
    "open": _EAGER | {"NESTED": 3, "MEMORY": 5, "OPEN": 3, "STATE": 3, "REFUSED": 0.2},
    "batched": _FUNC,
    "traced": _FUNC | {"RANDOM": 0},
    "func": _FUNC | {"LEVELS": 10, "STATE": 8},
    "func plain": _FUNC | {"BUFFERS": 8, "OLD": 6, "MEMORY": 3, "STATE": 6},
    "compile": {"PURE": 48, "WRITES": 16, "BUFFERS": 10, "COMMON": 12, "NESTED": 4, "OLD": 8, "MEMORY": 3},
    "compile func": {"PURE": 50, "WRITES": 18, "COMMON": 12, "NESTED": 5},
    "compile random": {"PURE": 40, "WRITES": 16, "RANDOM": 20, "BUFFERS": 6, "COMMON": 8},
}
# What words are exchanged for afterwards, by what the program can be made of.
LATER = {
    "eager": ("OBJECTS", "OBJECTS", "GENERATORS", "INNER"),
    "open": ("OBJECTS", "OBJECTS", "GENERATORS", "INNER"),
    "batched": ("OBJECTS",),
    "traced": ("OBJECTS",),
    "func": ("OBJECTS",),
    "func plain": ("OBJECTS", "GENERATORS"),
    "compile": (),
    "compile func": (),
    "compile random": (),
}
# What transforms inside a program can run, and what they cannot if they batch.
INSIDE = ("PURE", "PURE", "FUNCTIONS", "WRITES", "COMMON", "RANDOM", "LEVELS")
UNBATCHED = ("RANDOM", "LEVELS")
HOWS = {
    "eager": {
        "backward": 8, "twice": 2, "partial": 2, "double": 2, "accumulate": 2, "two_forwards": 2, "again": 2,
        "update": 2, "reversed": 1, "drop": 1, "thread": 1, "copied": 1, "no_grad": 1, "batched": 1,
        "threads": 0.5, "anomaly": 0.3,
    },
    "func": {
        "backward": 2, "double": 2, "grad": 2, "grad_params": 2, "vmap_grad": 2, "jvp": 1, "hessian": 1,
        "jacrev": 1, "grad_grad": 1, "vmap": 1, "forward_ad": 1, "jvp_grad": 1, "vjp": 1, "jacfwd": 1,
        "third": 0.5, "mixed": 1, "vmap_hessian": 0.5, "linearize": 0.5, "plain_over_grad": 1,
        "plain_over_jvp": 1,
    },
    "compile": {"backward": 4, "differences": 2, "grad": 2, "vmap_grad": 1},
}  # fmt: skip
# Ways of plain autograd, and those that batch a function; the others are levels of `torch.func`.
PLAIN = {"backward", "double", "differences"}
PLAIN_FUNC = PLAIN | {"forward_ad", "plain_over_grad", "plain_over_jvp"}
BATCHING = {"vmap_grad", "hessian", "jacfwd", "third", "vmap_hessian", "vmap"}
FLAGS = ("on0", "on1", "on2")
# From this number on programs have what `Drawing.more` draws; those before are as they were.
MORE = 2_000_000


class Drawing:
    """Draws one program."""

    def __init__(self, seed: int, flavour: str) -> None:
        self.dice, self.flavour, self.count = random.Random(f"{flavour}{seed}"), flavour, 0
        count = self.dice.randint(2, 4) if flavour == "eager" else self.dice.choice([1, 1, 2])
        self.steps = [self.step() for _ in range(count)]
        # Compiled code draws other numbers: programs that draw are called in the one way that allows for it.
        if any(step["how"] == "differences" for step in self.steps):
            self.steps = [step | {"how": "differences"} for step in self.steps]
        # Where a function runs again, so does what it does to Python's state.
        self.opens = flavour != "eager" or self.dice.random() < 0.4
        chances = CHANCES[self.scene({step["how"] for step in self.steps})]
        self.kinds, self.weights = list(chances), list(chances.values())
        # Planning takes longer than the rest.
        chance, ready = self.dice.random(), [name for name in POLICIES if name not in PLANNED]
        self.policies = ["nothing"] if chance < 0.2 else list(POLICIES) if chance < 0.28 else ready
        # What counts bytes is a mode, which compilers do not take.
        if self.policies == ["nothing"] and flavour != "compile":
            for step in self.steps:
                step |= {"bytes": True} if step["how"] in ("backward", "twice", "double") else {}

    def more(self, program: Program) -> Program:
        """The program with what is drawn by dice of its own, after all else: memory formats, what is around a
        step, weights that hooks fetch, hooks that count, and words of other kinds."""
        dice = random.Random(f"more {self.flavour}{program.seed}")
        for step in program.steps:
            if dice.random() < 0.25:
                step["layout"] = dice.choices(("transposed", "strided", "expanded"), (4, 4, 1))[0]
            if self.flavour == "func" and dice.random() < 0.15:
                step["around"] = "mode" if step["how"] in PLAIN_FUNC else dice.choice(("mode", "inference"))
            elif self.flavour == "eager" and dice.random() < 0.2:
                step["around"] = dice.choice(("mode", "mode forward", "clones", "clones back"))
            elif self.flavour == "eager" and dice.random() < 0.1 and step["how"] == "backward":
                step["how"] = dice.choice(("counted", "cloned", "on_cpu"))
                step.pop("bytes", None)
        later = LATER[self.scene({step["how"] for step in program.steps})]
        words = [s for body, at in program.statements() for s in (body[at],) if s.kind == "word"]
        if later and words and dice.random() < 0.3:
            # Results of scans and of transforms require gradients where others do not (docs/limits.md):
            # there a backward inside runs, and accumulates.
            scanned = any(word in program.source() for word in ("torch.func", "SCAN(", "LOOP("))
            if scanned or any(step["how"] == "batched" for step in program.steps):
                later = [kind for kind in later if kind != "INNER"]
            for statement in dice.sample(words, min(len(words), dice.choice((1, 1, 2)))):
                statement.word = dice.choice(WORDS[dice.choice(later)])
        source = program.source()
        # To give a tensor other data under a level of torch.func ends the process, without regions, too.
        alone = "self.tied" not in source and "torch.func" not in source
        # A region whose hooks fetch weights runs its function again, and what that does to Python's state.
        if self.flavour == "eager" and self.opens and "self.lin(" in source and alone:
            for step in program.steps:
                if dice.random() < 0.3 and step["how"] != "update":
                    step["fetched"] = True
        return program

    def scene(self, hows: set[str]) -> str:
        """What the program can be made of, by the ways in which it is called."""
        if self.flavour == "eager":
            return "open" if self.opens else "eager"
        if self.flavour == "compile":
            if "differences" in hows:
                return "compile random"
            return "compile" if hows <= PLAIN else "compile func"
        if "linearize" in hows:
            return "traced"
        return "func plain" if hows <= PLAIN else "batched" if hows & BATCHING else "func"

    def program(self, seed: int) -> Program:
        dice = self.dice
        body = self.body(["x", "y"], dice.randint(0, 2), 3)
        # What stands in a region for sure.
        body.append(self.region(self.around(["x", "y"], body), 3))
        body += self.body(self.around(["x", "y"], body), dice.randint(0, 2), 3)
        dtype = "float32" if self.flavour == "eager" and dice.random() < 0.2 else "float64"
        return Program(seed, self.flavour, body, body[-1].out, self.steps, dtype)

    def around(self, names: list[str], body: list[Statement]) -> list[str]:
        return names + [statement.out for statement in body]

    def body(
        self, names: list[str], length: int, depth: int, inside: tuple[str, ...] = ()
    ) -> list[Statement]:
        made: list[Statement] = []
        for _ in range(length):
            made.append(self.statement(self.around(names, made), depth, inside))
        return made

    def statement(self, names: list[str], depth: int, inside: tuple[str, ...]) -> Statement:
        dice, chance = self.dice, self.dice.random()
        if depth and chance < 0.2:
            return self.region(names, depth, inside)
        if depth and chance < 0.26 and not inside:
            out, ins = self.name(), self.ins(names)
            body = self.body(names, dice.randint(1, 2), depth - 1)
            return Statement(
                out, ins, body=body, kind="branch", flag=dice.choice(FLAGS), results=(body[-1].out, "")
            )
        kind = dice.choices(self.kinds, self.weights)[0]
        if inside:
            kind = dice.choice([kind for kind in inside if kind in self.kinds])
        return Statement(self.name(), self.ins(names), word=dice.choice(WORDS[kind]))

    def region(self, names: list[str], depth: int, inside: tuple[str, ...] = ()) -> Statement:
        dice = self.dice
        out, ins = self.name(), self.ins(names)
        call = dice.choice(["plain"] * 4 + list(CALLS))
        returns = dice.choice(["single"] * 4 + list(RETURNS))
        if self.opens and dice.random() < 0.2:
            call, returns = dice.choice(list(FUNCTIONAL_CALLS)), "single"
            if self.flavour == "compile" and call == "loop":
                call = "scan"
            batched = call == "vmapped" or "RANDOM" not in (inside or INSIDE)
            inside = tuple([kind for kind in INSIDE if not (batched and kind in UNBATCHED)])
        method = dice.random() < 0.25
        # A closure reads what is around it; a method has its arguments alone.
        own = [f"a{out[1:]}", f"b{out[1:]}"]
        seen = own if method else [*names, *own, *own]
        body = self.body(seen, dice.randint(1, 4), depth - 1, inside)
        results = body[-1].out, dice.choice([s.out for s in body] + own[1:])
        return Statement(
            out, ins, "", body, "region", call, returns, dice.choice(self.policies), "on0", method, results
        )

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def ins(self, names: list[str]) -> tuple[str, str]:
        recent = names[-2:]
        return self.dice.choice([*recent, self.dice.choice(names)]), self.dice.choice(names)

    def step(self) -> dict[str, Any]:
        dice, hows = self.dice, HOWS[self.flavour]
        step: dict[str, Any] = {"how": dice.choices(list(hows), list(hows.values()))[0]}
        if self.flavour == "func":
            flips = [flag for flag in FLAGS if dice.random() < 0.1]
            options = {"flip": flips, "mode": dice.choice([None] * 8 + ["train", "eval"])}
            options["randomness"] = dice.choice(["same", "different"])
            return step | {key: value for key, value in options.items() if value != DEFAULTS[key]}
        if self.flavour != "eager":
            return step
        flips = [flag for flag in FLAGS if dice.random() < 0.15]
        options = {
            "flip": flips,
            "mode": dice.choice([None] * 5 + ["train", "eval", "freeze", "unfreeze"]),
            "frozen": dice.random() < 0.1,
            "rows": dice.choice([3, 3, 3, 5, 2]),
            "autocast": dice.random() < 0.1,
            "requires": dice.random() > 0.2,
            "hook": dice.choice([None] * 6 + ["add", "remove"]),
            "late": dice.random() < 0.15,
            "factor": dice.choice([None] * 5 + [0.0, -0.0, 2.5]),
        }
        return step | {key: value for key, value in options.items() if value != DEFAULTS[key]}


def draw(seed: int, flavour: str) -> Program:
    """The program of this number."""
    drawing = Drawing(seed, flavour)
    program = drawing.program(seed)
    return drawing.more(program) if seed >= MORE else program
