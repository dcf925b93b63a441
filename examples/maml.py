# %% [markdown]
# # The inner loop of MAML
#
# Model-agnostic meta-learning differentiates through gradient steps: the outer loss depends on weights
# that an inner loop has trained. Autograd keeps every inner step. A region around a step keeps the
# weights between steps, and recomputes a step, its gradient included, when the outer backward comes to
# it.
#
#     python examples/maml.py

# %%
import torch
from torch.func import grad, vmap

from remat import remat, saved_residuals

torch.manual_seed(0)
weights = {"up": torch.randn(1, 40), "shift": torch.randn(40), "down": torch.randn(40, 1) / 40}
tasks = torch.rand(8) * 3  # phases of sines
x = torch.linspace(-3, 3, 64)[:, None]


def error(weights, x, y):
    return (torch.tanh(x @ weights["up"] + weights["shift"]) @ weights["down"] - y).square().mean()


def inner_step(weights, x, y):
    gradients = grad(error)(weights, x, y)
    return {name: w - 0.05 * gradients[name] for name, w in weights.items()}


# %% [markdown]
# The meta-loss of one task adapts on even points and is judged on odd ones. `vmap` runs all tasks at
# once.


# %%
def meta_loss_with(step):
    def of_task(weights, phase):
        y = torch.sin(x + phase)
        for _ in range(10):
            weights = step(weights, x[::2], y[::2])
        return error(weights, x[1::2], y[1::2])

    return lambda weights: vmap(of_task, (None, 0))(weights, tasks).mean()


# %%
expected = grad(meta_loss_with(inner_step))(weights)
for name, version in {"no remat": inner_step, "remat": remat(inner_step)}.items():
    loss = meta_loss_with(version)
    kept = saved_residuals(loss, weights).kept_bytes
    torch.testing.assert_close(grad(loss)(weights), expected)
    print(f"{name:<10}{kept:>10} bytes kept, meta-gradients equal")
