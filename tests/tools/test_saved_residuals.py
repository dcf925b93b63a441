"""saved_residuals: what is kept, how large it is, who made it, and where it is found."""

import gc
import types
import weakref

import pytest
import torch
from torch.func import grad, vmap

from remat import Residual, checkpoint_name, offload, remat, save_matmuls, save_names, saved_residuals
from remat.jax_names import print_saved_residuals
from remat.policies import save_everything, save_nothing
from tests.bank import BANK, subject
from tests.helpers import LiveBytes, crossed, rand
from tests.ways import regions

aten = torch.ops.aten


def mlp(params, x):
    h = torch.sin(x @ params["layers"][0]["w"])
    h = checkpoint_name(torch.tanh(h), "hidden")
    return (h @ params["layers"][1]["w"]).exp().sum()


PARAMS = {"layers": [{"w": rand(4, 5)}, {"w": rand(5, 3)}]}
X = rand(2, 4)
ARGUMENTS = [
    ("argument", "params['layers'][0]['w']", 160),
    ("argument", "params['layers'][1]['w']", 120),
    ("argument", "x", 64),
]


def brief(fn, *args, **kwargs):
    return [
        (r.why, r.path if r.op is None else str(r.op), r.bytes) for r in saved_residuals(fn, *args, **kwargs)
    ]


first, second = remat(lambda x: x.sin().exp()), remat(lambda x, w: torch.tanh(x @ w), policy=save_matmuls)
PLAIN = [
    ("output", "aten.mm.default", 80),
    ("output", "aten.tanh.default", 80),
    ("output", "aten.exp.default", 48),
]
PRODUCTS = [("policy", "aten.mm.default", 80), ("policy", "aten.mm.default", 48)]
# A function, its arguments, and what is kept of it.
LISTS = {
    "without remat": (mlp, (PARAMS, X), [*ARGUMENTS, *PLAIN]),
    "save_everything": (remat(mlp, policy=save_everything), (PARAMS, X), [*ARGUMENTS, *PLAIN]),
    "save_nothing": (remat(mlp, policy=save_nothing), (PARAMS, X), ARGUMENTS),
    "save_matmuls": (remat(mlp, policy=save_matmuls), (PARAMS, X), [*ARGUMENTS, *PRODUCTS]),
    "save_names": (
        remat(mlp, policy=save_names("hidden")),
        (PARAMS, X),
        [*ARGUMENTS, ("policy", "aten.tanh.default", 80)],
    ),
    "two regions": (
        lambda x, w: second(first(x) + x, w),
        (X, rand(4, 3)),
        [
            ("argument", "x", 64),
            ("argument", "w", 96),
            ("output", "aten.add.Tensor", 64),
            ("policy", "aten.mm.default", 48),
        ],
    ),
    "views of one block, of its whole size": (
        lambda x: (x[0].sin() * x[1:].cos().sum()).sum(),
        (rand(4, 4),),
        [("argument", "x", 128), ("output", "aten.sin.default", 32), ("output", "aten.sum.default", 8)],
    ),
    "what autograd saves, beside what is dead, where the input is larger": (
        remat(lambda x: (x.sum().exp(), x.sum(0).sin().sum())[1]),
        (rand(64, 8),),
        [("output", "aten.sum.dim_IntList", 64)],
    ),
    "beside an earlier graph": (
        lambda h: h.cos(),
        (rand(3).requires_grad_().sin().exp().tanh(),),
        [("argument", "h", 24)],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_kept(name):
    fn, args, expected = LISTS[name]
    assert brief(fn, *args) == expected


def test_every_field():
    (found,) = [
        r for r in saved_residuals(remat(mlp, policy=save_names("hidden")), PARAMS, X) if r.why == "policy"
    ]
    line = mlp.__code__.co_firstlineno + 2
    assert found == Residual(
        (2, 5), torch.float64, torch.device("cpu"), 80, "policy", aten.tanh.default, "hidden",
        f"{__file__}:{line} (mlp)", None,
    )  # fmt: skip


def test_printed_form(capsys):
    print_saved_residuals(remat(mlp, policy=save_matmuls), PARAMS, X)
    lines = capsys.readouterr().out.splitlines()
    first = mlp.__code__.co_firstlineno + 1
    assert lines == [
        "f64[4,5] 160 B from the argument params['layers'][0]['w']",
        "f64[5,3] 120 B from the argument params['layers'][1]['w']",
        "f64[2,4] 64 B from the argument x",
        f"f64[2,5] 80 B output of aten.mm from test_saved_residuals.py:{first} (mlp), saved by policy",
        f"f64[2,3] 48 B output of aten.mm from test_saved_residuals.py:{first + 2} (mlp), saved by policy",
        "128 B kept, 344 B held, in 5 tensors",
    ]
    print_saved_residuals(mlp, PARAMS, X)
    assert "named 'hidden', output of aten.tanh from test_saved_residuals.py" in capsys.readouterr().out


@pytest.mark.parametrize("wrap", [lambda f: f, remat])
def test_modules_and_captured_tensors(wrap):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    found = saved_residuals(wrap(model), X)
    assert [(r.why, r.path) for r in found][0] == ("argument", "input")
    scale = rand(2, 4)
    found = saved_residuals(lambda x: torch.sin(x * scale), X)
    assert ("captured", "scale") in [(r.why, r.path) for r in found]
    if wrap is not remat:
        found = saved_residuals(model, X)
        assert ("captured", "2.weight") in [(r.why, r.path) for r in found]


def test_only_what_requires_grad_is_differentiated():
    def product(x, w):
        return x * w

    x, w = rand(3), rand(3).requires_grad_()
    assert [r.path for r in saved_residuals(product, x, w)] == ["x"]
    assert [r.path for r in saved_residuals(product, x, w.detach())] == ["x", "w"]
    assert x.grad is None and not x.requires_grad


def test_keyword_and_variable_arguments():
    def fn(*rest, scale, **more):
        return (rest[0] * scale).sin() * more["shift"]

    paths = {
        r.path for r in saved_residuals(fn, rand(3), rand(2), scale=rand(3), shift=rand(3)) if r.op is None
    }
    assert paths == {"rest[0]", "scale", "shift"}


def test_functions_that_use_torch_func():
    def step(params, x):
        return grad(remat(mlp))(params, x)["layers"][0]["w"]

    before = [r for r in brief(step, PARAMS, X) if r[0] == "argument"]
    assert before == ARGUMENTS
    per_example = brief(vmap(remat(mlp, policy=save_matmuls), (None, 0)), PARAMS, rand(3, 2, 4))
    assert [(why, size) for why, _, size in per_example] == [
        ("argument", 160),
        ("argument", 120),
        ("argument", 192),
        ("policy", 240),
        ("policy", 144),
    ]


PROGRAMS = """transformer_mlp dropout every_second_doubled results_of_many_kinds embedding
    results_in_parts_of_one_memory registered_containers
    complex_arguments region_inside_that_saves gradient_inside autocast_inside""".split()


@pytest.mark.parametrize(("policy", "name"), crossed([None, "nothing", "matmuls", "ops"], PROGRAMS, every=4))
def test_bytes_are_those_that_stay_alive(name, policy):
    """Measured by what is not freed once the results are gone and the graph is not."""
    model = subject(BANK[name], policy or "nothing").build().double()
    x, y = rand(3, 4).requires_grad_(), rand(3, 4, seed=1).requires_grad_()
    with regions(policy is not None):
        model(x, y)  # the first call that meets a transform of torch.func inside holds all that it saves
        inside = sum(r.bytes for r in saved_residuals(model, x, y) if r.op is not None)
        with LiveBytes() as live:
            node = model(x, y).grad_fn
            kept = live.bytes
    assert node is not None and inside == kept


@pytest.mark.parametrize("policy", [save_matmuls, offload(save_matmuls), save_names("b")])
def test_names_are_told_whatever_kept_the_value(policy):
    def fn(x):
        b = checkpoint_name(checkpoint_name(x @ x, "b"), "c")
        return b.sin().sum()

    for under in (lambda f: f, torch.func.grad):
        found = saved_residuals(under(remat(fn, policy=policy)), rand(3, 3))
        assert [(r.op, r.name) for r in found if r.why == "policy"] == [(aten.mm.default, "b")]


@pytest.mark.parametrize("under", ["backward", "grad"])
def test_what_is_offloaded_is_listed(under):
    x = rand(3)

    def fn(x):
        return checkpoint_name(x.sin(), "z").sin().sum()

    region = remat(fn, policy=offload(save_names("z")))
    found = saved_residuals(region if under == "backward" else torch.func.grad(region), x)
    kept = [(r.op, r.name, r.bytes, r.host) for r in found if r.why == "policy"]
    assert kept == [(aten.sin.default, "z", 24, True)] and found.host_bytes == 24
    assert sum(line.endswith("(fn), offloaded by policy") for line in str(found).splitlines()) == 1


def test_what_lies_in_a_cycle_is_not_kept_whenever_the_collector_runs():
    def fn(x):
        cycle = types.SimpleNamespace(made=x.detach() * 2)
        cycle.itself = cycle
        out = x.sin()
        # The collector runs as the result goes, with the graph.
        weakref.finalize(out, gc.collect)
        return out

    gc.collect()
    assert saved_residuals(fn, torch.ones(64, requires_grad=True)).kept_bytes == 0
