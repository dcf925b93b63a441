"""What equinox's tests share: the loop that most of them run."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from remat import while_remat

SIZE = 20


def put(values, at, value):
    return torch.where(torch.arange(values.shape[-1]) == at, value, values)


class Problem:
    """A loop that turns a point by what a network says of it, and notes one coordinate of each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.mlp = nn.Sequential(
            nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)
        ).double()
        self.params = {name: p.detach() for name, p in self.mlp.named_parameters()}
        self.val1, self.val2 = torch.randn(2).double(), torch.randn(SIZE).double()

    def body(self, params):
        def body(carry):
            step, val1, val2 = carry
            theta = functional_call(self.mlp, params, (val1,))[0]
            real, imag = val1[0], val1[1]
            val1 = torch.stack(
                [real * theta.cos() - imag * theta.sin(), real * theta.sin() + imag * theta.cos()]
            )
            return step + 1, val1, put(val2, step, val1[0])

        return body

    def run(self, val1, val2, params, steps, start: Any = 0, **options):
        if options.pop("max_steps_only", False):
            options["max_steps"], more = steps, lambda carry: True
        else:
            more = lambda carry: carry[0] < steps  # noqa: E731
        return while_remat(more, self.body(params), (start, val1, val2), **options)[1:]

    def plain(self, val1, val2, params, steps, start: Any = 0):
        carry, body = (start, val1, val2), self.body(params)
        for _ in range(steps):
            # As equinox's reference has it, so that every example of a batch may stop by itself.
            new, go = body(carry), torch.as_tensor(carry[0] < steps)
            carry = tuple(torch.where(go, torch.as_tensor(a), b) for a, b in zip(new, carry, strict=True))
        return carry[1:]

    @property
    def args(self):
        return self.val1, self.val2, self.params


def total(values: Any) -> torch.Tensor:
    return torch.stack([v.sum() for v in values]).sum()
