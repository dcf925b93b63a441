"""Programs that levels of `torch.func` tell apart: what regions capture, results without tangents, transforms
inside, and operands that another level differentiates."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vjp

from remat import checkpoint_name
from tests.bank.library import LOOP, SCAN, R, Twin
from tests.bank.program import expressions, program

expressions(
    "",
    "nests scans captures",
    scan_that_captures_an_argument="SCAN(lambda h: torch.tanh(h @ m.w) * x, x.cos(), 2, 1) * y",
    scan_whose_carry_comes_to_nothing="SCAN(lambda h: F.layer_norm(x, (4,), m.scale), x, 2, 1) * y",
)
expressions(
    "",
    "nests scans",
    loop_of_regions="LOOP(lambda h: R(lambda h: h.softmax(-1) @ m.w)(h), x, 2) * y",
)
expressions(
    "",
    "nests captures",
    linear_of_what_lies_turned="R(lambda x: F.linear(x.t().sin().contiguous().t(), m.w.cos()))(x) * y",
)
expressions(
    "",
    "torch.func",
    jacobian_inside="torch.func.jacrev(lambda a: (a * x[0]).sin() @ m.w)(y[0]) @ y.t().sum(1) * x",
    forward_jacobian_inside="torch.func.jacfwd(lambda a: (a * x[0]).sin() @ m.w)(y[0]).sum(0) * x",
    hessian_inside="torch.func.hessian(lambda a: ((a @ m.w).sin() * x[0]).sum() + a.prod())(y[0]).sum(0) * x",
    gradients_of_rows_inside="torch.vmap(torch.func.grad(lambda a, b: (a @ m.w * b).sin().sum()))(x, y) * y",
)


@program("", "nests captures")
def three_deep_that_capture(m, x, y):
    return R(lambda a: R(lambda b: R(lambda c: a.sin() * a + b.sin() * b * c)(b))(a * 2))(x) * y


@program("", "nests torch.func")
def gradient_over_regions_that_capture(m, x, y):
    return grad(lambda a: R(lambda a: R(lambda: a.sin() * a)())(a).sum())(x) * y


@program("", "nests scans")
def scan_of_batch_statistics(m, x, y):
    return SCAN(lambda h: F.batch_norm(h * y, None, None, m.scale, m.scale, True), x, 2, 1)


@program("", "nests scans torch.func")
def gradients_in_a_scan(m, x, y):
    return SCAN(lambda h: grad(lambda a: (a.sin() * h.cos() * y).sum())(x) * h, x.exp(), 2, "sqrt")


@program("", "nests", shape=(2, 4))
def product_of_a_turned_batch(m, x, y):
    """Copied or not, by whether the weight is differentiated."""
    return R(lambda x: (x.transpose(0, 1) @ m.w).sin())(x).transpose(0, 1) * y


@program("", "nests")
def result_that_no_tangent_reaches(m, x, y):
    still, moves = R(lambda a: (y * torch.sin(y), (a @ m.w).sin()))(x)
    made = torch.empty_like(still)
    with torch.no_grad():
        torch.sin(still, out=made)
    return still * made * moves


@program("", "nests captures")
def captured_result_that_no_tangent_reaches(m, x, y):
    still = R(lambda: (x * 1, y * torch.sin(y @ m.w))[1])()
    return (still.tanh() * x).logsumexp(1, keepdim=True) * y


@program("", "nests functions")
def halves_of_a_region_inside(m, x, y):
    left, right = R(lambda a: (lambda v: (v[:, :2], v[:, 2:]))(R(torch.sin)(a)))(x * 2)
    return torch.cat([left.sin(), right * 3], 1) * y


@program("", "nests functions writes")
def function_of_what_a_region_inside_wrote(m, x, y):
    def write(b):
        v = b.cos() * 2
        v.view(-1)[::2].mul_(2)
        return Twin.apply(v, y)[0]

    inner = R(write, "ops")
    return R(lambda a: torch.tanh(inner(torch.tanh(inner(a) @ m.w)) @ m.w))(x)


@program("", "nests torch.func writes")
def gradient_of_an_index_put(m, x, y):
    def write(b):
        v = b.sin()
        return v.index_put_((torch.tensor([0, 0]), torch.tensor([1, 2])), b[0, :2], accumulate=True)

    inner = R(R(write), "everything")
    return R(lambda x: grad(lambda a: inner(a).sin().sum())(x))(x) * y


@program("", "torch.func", found="jvp_grad/nothing hessian/nothing plain_over_jvp/nothing")
def vjp_inside(m, x, y):
    return vjp(lambda a: (a * x).sin() @ m.w, y)[1](x)[0]  # type: ignore[index]


@program("", "torch.func")
def gradient_of_a_tree_inside(m, x, y):
    return grad(lambda p: (p["a"].sin() * x * p["b"][0]).sum())({"a": y, "b": [x @ m.w]})["b"][0] * y


@program("", "nests torch.func captures")
def gradient_of_gradient_inside(m, x, y):
    energy = R(lambda a: (a**3 * x).sum())
    return grad(lambda a: (grad(energy)(a) * y).sum())(y)


@program("", "nests captures modules")
def modules_in_a_partial_and_a_default(m, x, y):
    body = lambda nets, x, more={"a": m.mlp}: more["a"](nets[0](x).sin())  # noqa: B006, E731
    return R(functools.partial(body, [m.lin]))(x) * y


@program("", "nests modules")
def weights_put_into_a_module(m, x, y):
    return R(lambda w, x: functional_call(m.lin, {"weight": w}, (x,)).sin())(m.w.cos(), x) * y


@program("", "nests names captures")
def named_view_that_a_region_inside_is_given(m, x, y):
    def outer(a):
        view = checkpoint_name(torch.tanh(x @ m.w), "h")
        b, c = R(lambda b, c: (b, (c.sin() + a).exp()))(view, a)
        return b * 1.5 + c

    return R(outer, "odd")(y)


@program("BUFFERS", "buffers torch.func")
def batch_norm_before_a_forward_derivative(m, x, y):
    with torch.no_grad():
        m.queue.copy_(torch.cat([x.detach()[:1], m.queue[:-1]]))
    h = m.bn(x) * m.queue[1].sin()
    return torch.func.jvp(lambda t: t.sin() * x, (h,), (x,))[1] * y


@program("", "nests")
def halves_of_its_own_primal(m, x, y):
    def fn(a):
        v = a.sin()
        return v, torch.autograd.forward_ad.unpack_dual(v).primal

    value, primal = R(fn)(x * 2)
    return value.cos() * primal * y


@program("", "nests scans captures")
def scan_in_a_region_by_capturing(m, x, y):
    scanned = lambda w, x: SCAN(lambda h: torch.tanh(h @ w), x, 1, "sqrt", "ops")  # noqa: E731
    inner = lambda w, x: R(lambda x: scanned(w, x), "matmuls")(x)  # noqa: E731
    return R(lambda w, x: inner(w, x).sum(), "matmuls")(m.w, x) * y


@program("", "nests writes torch.func")
def write_that_one_level_differentiates(m, x, y):
    def scaled(x, y):
        h = x.sin()
        return h.mul_(y) + h

    region = R(scaled)
    return grad(lambda y: region(x, y).sin().sum())(y) * x


@program("", "nests torch.func", found="double/none")
def forces_amid_two_regions(m, x, y):
    inner = R(lambda a: (a @ m.w).sin(), "matmuls")
    forces = R(lambda a: grad(lambda a: inner(a).square().sum())(a) * a.cos(), "ops")
    return R(lambda a: forces(a * 1.5), "everything")(x) * y


@program("", "torch.func modules")
def embedding_renormalized_beside_a_transform(m, x, y):
    by = grad(lambda t: m.lin(t).sin().sum())(x)
    return m.renorm(torch.arange(len(x)) % 5) * x * by


@program("", "nests torch.func inner")
def gradient_beside_a_region_inside(m, x, y):
    def inner(t, v):
        _ = R(lambda b: t.exp() * 1.5)(v) + 1
        return v * y.sin().clone()

    by = grad(lambda t: R(inner)(t, x).sum())(x.sin())
    return by * x + x.sin()


@program("", "decisions")
def numbers_of_what_is_overwritten(m, x, y):
    h = x.cos()
    numbers = h.detach().add_(1).tolist()
    return x.exp().tanh() * torch.tensor(numbers, dtype=x.dtype) * h.zero_().add_(2)


@program("", "decisions")
def columns_chosen_by_numbers(m, x, y):
    chosen = (x @ m.w).sin().argmax(1).tolist()
    return torch.stack([x[i, j].exp() for i, j in enumerate(chosen)]).sin()[:, None] * y


@program("", "nests captures torch.func")
def product_with_a_gradient_of_a_weight(m, x, y):
    return R(lambda x: x @ grad(lambda w: w.sin().square().sum())(m.w))(x) * y


@program("", "captures torch.func")
def weight_that_no_walk_finds(m, x, y):
    hidden = iter([m.w] * 9)
    region = R(lambda x: grad(lambda a: (a.tanh() * x).sum())(next(hidden)[0]) * x)
    return region(x) + y @ m.w


@program("", "nests")
def factories_of_shapes_without_data(m, x, y):
    like = torch.empty(4, device="meta", dtype=x.dtype)
    made = torch.ones_like(like, device="cpu").exp() + like.new_full((4,), 2.0, device="cpu")
    return (x.sin() * made).sin() * torch.zeros_like(like, device=torch.device("cpu")).add(3)


@program("", "draws")
def constants_written_viewed_and_drawn(m, x, y):
    table = torch.zeros(len(x), 4, dtype=x.dtype)
    table[1] = 2.0
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    scores = (x @ x.t()).masked_fill(~mask, -1e9).softmax(-1)
    large = torch.arange(4000, dtype=x.dtype).cos()
    return (scores @ x @ m.w) * table.exp() * torch.rand(4, dtype=x.dtype).cos() + large[:4] * x.sin()


@program("", "nests scans captures", found="vmap_hessian/nothing vmap_hessian/none")
def loops_that_return_what_they_capture(m, x, y):
    made = x.tanh()
    scanned = SCAN(lambda h: made, y @ m.w, 2, 1) + SCAN(lambda h: R(lambda a, b: b)(h, made), y, 2, "all")
    return LOOP(lambda h: (h.sin(), made)[1], scanned @ m.w, 2) * y


@program("", "nests scans")
def loop_between_two_scans(m, x, y):
    inner = lambda c: SCAN(lambda c: (c @ m.w).sin(), c, 2, 1)  # noqa: E731
    return SCAN(lambda h: LOOP(inner, h, 2) * y, x, 2, 2)


@program("", "nests scans names")
def scan_of_names_in_a_region(m, x, y):
    step = lambda h: torch.tanh(checkpoint_name(h @ m.w, "h") + y)  # noqa: E731
    return R(lambda x: SCAN(step, x, 3, "sqrt", "names"), "matmuls")(x)
