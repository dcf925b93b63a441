"""Programs of scans and loops whose steps do more than compute, and of views that a policy keeps or sends."""

from __future__ import annotations

import torch
from torch.func import grad

from tests.bank.library import SCAN, UNSEEN, ByFunc, R, checkpoint_name
from tests.bank.program import program


@program("", "nests scans stores", found="double/nothing")
def attribute_set_after_a_scan(m, x, y):
    """A region inside is a method, so that the search for what it captures finds the attribute."""
    h = SCAN(lambda h: R(m.mlp.forward)(h) * x, x, 2, 1)
    m.noted = h.sin()
    return m.noted * x * y


@program("", "nests scans stores", found="grad/nothing")
def step_that_leads_to_what_a_region_stores(m, x, y):
    """The second run of the region finds the result of the first, and does not read it."""

    def whole(x):
        last = SCAN(lambda h: torch.sin(m.lin(h + x)), x, 2, 1)
        m.noted = last.sin()
        return last

    return R(whole)(x) * y + m.noted.cos()


@program("", "nests scans", found="forward_ad/nothing")
def step_without_a_derivative_by_a_capture(m, x, y):
    """Forward mode knows that gradient to be zero: such zeros have no memory, and their tangents would."""
    return SCAN(lambda h: h * h.detach() + 0 * x, x, 2, 1).tanh() * y


@program("", "nests", found="grad/views backward/views")
def halves_that_a_region_inside_makes_again(m, x, y):
    """What is kept of a view lies apart from its base; the region's results are made of the base."""
    halves = lambda x: ((h := x.sin())[:, :2], h[:, 2:])  # noqa: E731
    return torch.cat(R(halves)(x), 1).sin() * x * y


@program("", "raw memory nests captures", found="in_checkpoint/nothing in_checkpoint/matmuls")
def captures_of_a_region_that_runs_again(m, x, y):
    h, k, c = x.sin(), x.tanh(), y.cos()
    return R(lambda a: a.exp() * k * UNSEEN(a, 2.0) * c)(h)


@program("", "nests torch.func decisions", found="grad/everything backward/matmuls")
def decision_beside_an_operand_that_is_copied(m, x, y):
    """The inner operand is an expanded tensor, copied in the forward alone."""
    other = (x @ m.w).tanh()
    inner = R(lambda moving, still: torch.where(still > 0, still, still.sin()) * moving)
    wide = x.sum(0, keepdim=True).sin().expand_as(other)
    return grad(lambda moving: inner(moving, other).sum())(wide) + x


SENT = "backward/away grad/away vmap_grad/away grad_vmap/away grad_grad/away"


@program("", "", found=SENT)
def looks_that_are_sent_away(m, x, y):
    """An argument and a look at it lie at one address: what is sent is no argument."""
    flat = x.view(-1).sin().view(x.shape)
    return (x.t().sin() * x.t().cos()).t() * flat + x[:2].exp().sum() * y


@program("", "names", found=f"{SENT} backward/offload")
def named_argument_that_is_sent_away(m, x, y):
    return checkpoint_name(x, "h").sin() * x.cos() * y


@program("OLD", "functions", found="double/nothing double/matmuls double/everything")
def function_that_transforms_in_its_backward(m, x, y):
    return ByFunc.apply((x @ m.w).tanh()) @ m.w * y
