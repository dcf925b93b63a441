"""torch.func.grad over a region, and remat's own grad over it."""

from torch.func import grad, grad_and_value

import remat.transforms
from tests.helpers import check, gradients, inexact, loss_of, matrix, scalar


@matrix("grad")
def test_grad(name, policy):
    def run(fn, args):
        grads, value = grad_and_value(loss_of(fn), inexact(args))(*args)
        return value, grads

    check(name, policy, run)


@matrix("grad")
def test_outputs_come_through_aux(name, policy):
    def run(fn, args):
        def loss(*args):
            outputs = fn(*args)
            return scalar(outputs), outputs

        grads, outputs = grad(loss, inexact(args), has_aux=True)(*args)
        return outputs, grads

    check(name, policy, run)


@matrix("grad", policies=("nothing", "matmuls", "rule"))
def test_grad_without_a_retained_graph(name, policy):
    def run(fn, args):
        return remat.transforms.value_and_grad(loss_of(fn), inexact(args))(*args)

    check(name, policy, run)


@matrix("grad", "second", policies=("nothing", "matmuls", "rule"))
def test_backward_through_func_grad(name, policy):
    """The result of torch.func.grad is differentiated once more by plain autograd."""

    def run(fn, args):
        leaves = [a.clone().requires_grad_(i in inexact(args)) for i, a in enumerate(args)]
        grads = grad(loss_of(fn), inexact(args))(*leaves)
        return (), gradients(grads, leaves, materialize_grads=True)

    check(name, policy, run, order=2)
