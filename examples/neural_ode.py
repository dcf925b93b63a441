# %% [markdown]
# # A neural ODE
#
# `dh/dt = f(h)` is solved by 24 steps of Runge-Kutta. The exact derivative of the solver needs the state
# at every step. `scan_remat` keeps a few states and evaluates steps again: exact gradients, not those of
# an adjoint ODE.
#
#     python examples/neural_ode.py

# %%
import torch

from remat import scan_remat
from remat.cli.measure import trace_memory

torch.manual_seed(0)
up = (torch.randn(8, 32) / 8**0.5).requires_grad_()
down = (torch.randn(32, 8) / 32**0.5).requires_grad_()
start, steps = torch.randn(16, 8), 24


def field(h):
    return torch.tanh(h @ up) @ down


def runge_kutta(h, _=None):
    dt = 1 / steps
    a = field(h)
    b = field(h + dt / 2 * a)
    c = field(h + dt / 2 * b)
    d = field(h + dt * c)
    return h + dt / 6 * (a + 2 * b + 2 * c + d), None


def loop(h):
    for _ in range(steps):
        h, _ = runge_kutta(h)
    return h


# %% [markdown]
# Four states take the proven least number of evaluations for four. `"sqrt"` keeps about 10.

# %%
versions = {
    "no remat": loop,
    "4 states": lambda h: scan_remat(runge_kutta, h, length=steps, checkpoints=4)[0],
    "sqrt": lambda h: scan_remat(runge_kutta, h, length=steps, checkpoints="sqrt")[0],
    "all states": lambda h: scan_remat(runge_kutta, h, length=steps, checkpoints="all")[0],
}
expected = torch.autograd.grad(loop(start).square().sum(), (up, down))
for name, solve in versions.items():

    def step(mark, solve=solve):
        value = solve(start).square().sum()
        mark()
        return torch.autograd.grad(value, (up, down))

    measured = trace_memory(step)
    torch.testing.assert_close(measured.result, expected)
    print(f"{name:<12}{measured.kept:>10} bytes kept, gradients equal")
