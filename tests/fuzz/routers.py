"""`python -m tests.fuzz.routers`: mixtures of experts drawn at random, with noise in what is computed again.

Each program routes otherwise, in other sizes, under another policy and transform. The logits of the router
have up to a thousandth of noise in every run but the first, and are about as small themselves. So a decision
that is made again is made otherwise, which moves gradients by tens of percent. The noise alone moves them by
less than a thousandth, by the norm of all gradients together. (Single entries are moved by more: a softmax's
entry changes by up to twice the noise of its logits, in relation to itself.)
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from remat import RematError, offload, remat, save_matmuls, save_nothing
from tests.compiled import compiled
from tests.helpers import forget, seed_only_what_is_there
from tests.policies import test_decisions as routers

POLICIES = [save_nothing, save_matmuls, offload(save_matmuls)]
# What no noise comes to. What it may come to is `routers.LIMIT`.
FLIPPED = 1e-2


class Case:
    """The program of a number."""

    def __init__(self, seed: int, with_compiled: bool) -> None:
        dice = random.Random(f"router{seed}")
        self.seed, self.dice = seed, dice
        self.route = dice.choice(routers.ALL)
        ways = ["backward", "grad"]
        if self.route in routers.BATCHED:
            ways += ["vmap"] + ["compiled", "compiled grad", "compiled vmap"] * with_compiled
        self.way, self.policy = dice.choice(ways), dice.choice(POLICIES)
        self.tokens, self.width, self.experts = dice.randint(8, 96), dice.randint(3, 8), dice.randint(4, 16)

    def __str__(self) -> str:
        sizes = f"{self.tokens} x {self.width}, {self.experts} experts"
        return f"seed {self.seed}: {self.route.__name__}, {self.way}, {self.policy}, {sizes}"

    def arguments(self, draw: int) -> list[Tensor]:
        make = torch.Generator().manual_seed(1_000_003 * draw + self.seed)
        rows = (2,) if self.way.endswith("vmap") else ()
        shapes = [(*rows, self.tokens, self.width), (self.width, self.experts)]
        shapes.append((self.experts, self.width, self.width))
        x, router, w = (torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes)
        return [x, router * 0.002, w]

    def gradients(self, fn: Any, draws: int) -> list[Any]:
        """Of every draw of arguments; what is compiled is compiled once for all of them."""
        derived = self.derived(routers.loss(fn))
        found = []
        for draw in range(draws):
            routers.RUNS[0] = 0
            found.append(derived(*self.arguments(draw)))
        return found

    def derived(self, loss: Any) -> Any:
        if self.way.startswith("compiled"):
            torch._dynamo.reset()
        if self.way in ("backward", "compiled"):
            loss = loss if self.way == "backward" else compiled(loss)

            def backward(*args: Tensor) -> Any:
                args = tuple(t.requires_grad_() for t in args)
                return torch.autograd.grad(loss(*args), args)

            return backward
        derived = grad(loss, (0, 1, 2))
        if self.way.endswith("vmap"):
            derived = vmap(derived, (0, None, None))
        return compiled(derived) if self.way.startswith("compiled") else derived

    def off(self, draws: int) -> list[float]:
        """How far the gradients of each draw are from those without remat."""
        forget()
        expected = self.gradients(self.route, draws)
        got = self.gradients(remat(self.route, policy=self.policy), draws)
        return [routers.distance(*pair) for pair in zip(got, expected, strict=True)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.routers", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last")
    parser.add_argument("--compiled", action="store_true", help="some of them compiled (seconds each)")
    parser.add_argument("--draws", default=2, type=int, help="calls of each program, with other numbers each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seed_only_what_is_there()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    worst = 0.0
    for seed in range(*map(int, options.seeds.split(":"))):
        case = Case(seed, options.compiled)
        try:
            calls = case.off(options.draws)
        except RematError as error:
            counts["refused"] += options.draws
            print(case, str(error)[:200], flush=True)
            continue
        for draw, off in enumerate(calls):
            worst = max(worst, off)
            kind = "flipped" if off > FLIPPED else "noisy" if off > routers.LIMIT else "same"
            counts[kind] += 1
            if kind != "same":
                print(case, f"draw {draw} off by {off:.3g}", flush=True)
    print(f"{dict(counts)}, at most {worst:.3g}")
    return int(counts["same"] < sum(counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
