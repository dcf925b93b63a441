# %% [markdown]
# # A physics-informed network
#
# The network `u` is trained so that `u'' = -pi^2 sin(pi x)` with `u(0) = u(1) = 0`. The loss holds second
# derivatives of the network at every point, and training differentiates it a third time. Autograd keeps
# values of all three orders. With regions it keeps the inputs of the layers, at every order.
#
#     python examples/pinn.py

# %%
import math

import torch
from torch.func import grad, jvp, vmap

from remat import remat, saved_residuals

torch.manual_seed(0)
sizes = [1, 32, 32, 32, 32, 1]
start = [torch.randn(a, b, dtype=torch.float64) / a**0.5 for a, b in zip(sizes, sizes[1:], strict=False)]
points = torch.linspace(0, 1, 64, dtype=torch.float64)


def layer(weight, x):
    return torch.tanh(x @ weight) + torch.sin(x @ weight)


# %% [markdown]
# The second derivative is forward over forward: two tangents through the network, at each point.


# %%
def loss_with(layer):
    def u(weights, x):
        h = x[None]
        for weight in weights[:-1]:
            h = layer(weight, h)
        return (h @ weights[-1])[0] * x * (1 - x)  # zero at both ends

    def second(weights, x):
        def first(x):
            return jvp(lambda x: u(weights, x), (x,), (torch.ones_like(x),))[1]

        return jvp(first, (x,), (torch.ones_like(x),))[1]

    def loss(weights):
        residual = vmap(second, (None, 0))(weights, points) + math.pi**2 * torch.sin(math.pi * points)
        return residual.square().mean()

    return loss


# %% [markdown]
# The gradient of the loss is the same with regions, and less waits for it.

# %%
expected = grad(loss_with(layer))(start)
for name, version in {"no remat": layer, "remat": remat(layer)}.items():
    loss = loss_with(version)
    kept = saved_residuals(loss, start).kept_bytes
    torch.testing.assert_close(grad(loss)(start), expected)
    print(f"{name:<10}{kept:>10} bytes kept, gradients equal")
