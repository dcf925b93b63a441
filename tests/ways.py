"""The ways to run a program, and the one checker: a program with regions and without, side by side, and all
that can be seen of either after every step."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from remat import RematError
from tests.bank import Subject, library
from tests.helpers import LiveBytes, nan_where_nobody_wrote

Seen = dict[str, Any]
# What a step may say besides `how`.
DEFAULTS: dict[str, Any] = {
    "flip": [], "mode": None, "frozen": False, "rows": 3, "autocast": False, "requires": True, "hook": None,
    "late": False, "factor": None, "bytes": False, "randomness": "same", "layout": "contiguous",
    "around": None, "fetched": False,
}  # fmt: skip


@dataclass
class Verdict:
    """How a program went.

    `kind`: same, invalid (torch cannot run it), refused, standing (a loud fault that is known), failed, or
    memory (right, with more bytes than without regions).
    """

    kind: str
    what: str = ""


@contextlib.contextmanager
def regions(wanted: bool) -> Iterator[None]:
    before, library.on[0] = library.on[0], wanted
    try:
        yield
    finally:
        library.on[0] = before


def laid(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in another memory format."""
    if layout == "contiguous":
        return tensor.clone()
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "expanded":
        return tensor[:1].clone().expand_as(tensor)
    if layout == "channels_last":
        return tensor.clone(memory_format=torch.channels_last if tensor.ndim == 4 else torch.preserve_format)
    raise ValueError(layout)


LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "channels_last")


class Changes(TorchFunctionMode):
    """A mode of the user's that changes what some functions return."""

    OF = (torch.sin, Tensor.sin, torch.tanh, Tensor.tanh, torch.nn.functional.gelu, Tensor.exp)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.25 if func in self.OF else out


class OfUsers(torch.Tensor):
    """A class of tensors without a dispatch of its own, as names of axes and units have them."""


# What may be around a step: around all of it, or around its forward alone. With "class" what a model is given
# and its buffers are of a class of the user's.
AROUND: dict[str, Callable[[], Any]] = {"mode": Changes, "inference": torch.inference_mode}
AROUND_FORWARD: dict[str, Callable[[], Any]] = {
    "mode forward": Changes,
    "clones": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "clones back": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: (t, t._version), unwritten),
}


def unwritten(packed: tuple[Tensor, int]) -> Tensor:
    """A clone of what was saved; autograd does not count what is written to it where there are hooks."""
    if packed[0]._version != packed[1]:
        raise RuntimeError("what was saved was written to")
    return packed[0].clone()


@contextlib.contextmanager
def fetched(module: nn.Module | None) -> Iterator[None]:
    """While this lasts the module has its weights when it is called and when its backward runs, and memory
    of others' between."""
    if module is None:
        yield
        return
    home = {name: p.data for name, p in module.named_parameters()}

    def fetch(module: Any, *_: Any) -> None:
        for name, value in home.items():
            getattr(module, name).data = value

    def drop(module: Any, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: fetch(module))
        for name, value in home.items():
            getattr(module, name).data = torch.full_like(value, 7.0)

    hooks = module.register_forward_pre_hook(fetch), module.register_forward_hook(drop)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        fetch(module)


class Pass:
    """One of the two: a model of the program, and what its steps leave behind."""

    def __init__(self, subject: Subject, dtype: torch.dtype, ours: bool, backend: str | None) -> None:
        self.subject, self.source = subject, subject.text
        self.dtype, self.ours, self.backend = dtype, ours, backend
        self.streams = True  # whether random streams are compared: compiled code has others
        torch.manual_seed(11)
        self.model = subject.build().to(dtype)
        self.model.last = self.model.last.to(dtype)
        self.hooks: list[Any] = []
        self.wrapped: Callable[..., Tensor] | None = None  # the model as several processes train it
        library.lookup.cache_clear()

    def run(self, step: dict[str, Any], seed: int) -> Seen:
        step = DEFAULTS | step
        self.randomness: str = step["randomness"]
        self.around: str | None = step["around"]
        seeded(seed)
        self._prepare(step)
        with regions(self.ours), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A sparse product under autocast is another one under any dispatch mode: torch's own.
            casts = step["autocast"] and "sparse" not in self.source
            cast = torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext()
            module = getattr(self.model, "lin", None) if step["fetched"] else None
            with cast, AROUND.get(step["around"], contextlib.nullcontext)(), fetched(module):
                seen = WAYS[step["how"]](self, step)
        state = self.state()
        if step["how"] == "differences":  # what is drawn comes to buffers and attributes, too
            state = pytree.tree_map(
                lambda v: v.shape if isinstance(v, Tensor) and v.is_floating_point() else v, state
            )
        return seen | state

    def inputs(self, step: dict[str, Any]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step["rows"])
        shape = step["rows"], *self.subject.shape
        both = torch.randn(2, *shape, generator=generator, dtype=self.dtype, device="cpu")
        x, y = [laid(t, step["layout"]) for t in both.to(library.device[0]).unbind(0)]
        if self.around == "class":
            x, y = x.as_subclass(OfUsers), y.as_subclass(OfUsers)
        return x.requires_grad_(step["requires"]), y

    def _prepare(self, step: dict[str, Any]) -> None:
        model = self.model
        model.zero_grad()
        for module in model.modules() if self.around == "class" else ():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.as_subclass(OfUsers)
        for flag in step["flip"]:
            setattr(model, flag, not getattr(model, flag))
        if step["mode"] in ("train", "eval"):
            model.train(step["mode"] == "train")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d) and step["mode"] in ("freeze", "unfreeze"):
                module.train(step["mode"] == "unfreeze")
        for parameter in model.parameters():
            parameter.requires_grad_(not step["frozen"])
            break
        if step["factor"] is not None:
            model.factor = step["factor"]
        linear = next((m for m in model.modules() if type(m) is nn.Linear), None)
        if step["hook"] == "add" and linear is not None:
            self.hooks.append(linear.register_forward_hook(lambda module, args, out: out * 1.5))  # pyright: ignore
        elif step["hook"] == "remove" and self.hooks:
            self.hooks.pop().remove()

    def leaves(self, x: Tensor) -> list[Tensor]:
        return [t for t in (x, *self.model.parameters()) if t.requires_grad]

    @functools.cached_property
    def lean(self) -> bool:
        """Whether its bytes can be compared: what it writes to, a region holds as it was before."""
        held = r"self\.(steps|mean|queue|bn|last|escaped|cache|spectral|instance|renorm|gru)|numpy|\.data\b"
        held += r"|torch\.func|map_"
        return re.search(held, self.source) is None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The model's result as a number, with what escaped by side effects."""
        call: Callable[..., Tensor] = self.model
        if self.backend is not None:
            call = torch.compile(self.model, backend=self.backend, fullgraph=True)
        with AROUND_FORWARD.get(self.around or "", contextlib.nullcontext)():
            parts = [call(x, y), *self.model.escaped]
        self.model.escaped.clear()
        self.model.noted = None
        # Connected to every leaf: a transform inside may connect its results to what does not count.
        return total(parts) + sum((0 * leaf.double()).sum() for leaf in self.leaves(x))

    def state(self) -> Seen:
        """Buffers, attributes and random streams."""
        model = self.model
        seen: Seen = {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
        for name in ("calls", "factor", "history", "gradients", "shared", "cache", "last"):
            value = getattr(model, name)
            if name in ("history", "gradients") and UNDER_A_BUDGET.search(self.source):
                continue
            seen[f"self.{name}"] = pytree.tree_map(
                lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value
            )
        # What a backward inside of a Function has accumulated.
        seen["self.grad"] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if not self.streams:
            return seen
        seen["random stream"] = torch.default_generator.get_state()
        if library.device[0].type == "cuda":
            seen["random stream of the card"] = torch.cuda.get_rng_state(library.device[0])
        seen["own random stream"] = model.generator.get_state()
        seen["Python's random stream"] = hash(random.getstate())
        _, words, at, *_ = np.random.get_state()
        seen["NumPy's random stream"] = hash(words.tobytes()), at  # type: ignore[union-attr]
        return seen


# A policy other than to keep nothing may keep what autograd does not, and under torch.func nodes are regions.
POLICED = re.compile(r'"(?!nothing)(' + "|".join(library.POLICIES) + r')"\)|torch\.func|SCAN|LOOP')


# Refusals of torch's own: results of a transform inside are connected to more than they depend on, and plain
# forward mode finds rules for torch.func's levels alone (docs/limits.md).
TORCHS = re.compile(
    "must implement the jvp function|vmap: (inplace arithmetic|index_put_|scatter_add_|aten::index_copy_)"
    "|Batching rule not implemented|Trying to use forward AD with _sparse_addmm"
    r"|attempting to call Tensor.requires_grad_\(\)|Vmap does not currently support same randomness"
    "|value out of a tracing tensor"
    "|Nested forward mode AD|derivative for .* is not implemented|A carry must have the same shape"
)
# Of programs with a transform or a scan inside alone, whose results may be connected to what they do not
# depend on: else an error of this kind is a region's.
OF_TRANSFORMS = re.compile(
    "modified by an inplace operation|what was saved was written to|Trying to use forward AD with"
    "|expand is unsupported for Sparse|vmap: aten::lerp_"
)
# Loud faults that stand, of transforms in regions and of scans under transforms (docs/limits.md).
STANDING = re.compile(
    "setStorage: sizes|doesn't match the broadcast shape"
    "|forward AD with _scaled_dot_product"
    # A cache filled under two levels, of which torch takes off one: torch alone dies in the next call.
    r"|level\.has_value\(\)"
    # torch's formula for logsumexp: the derivative of its tangent.
    "|which is output 0 of Exp, is at version 1"
    # A Function with a generated vmap rule and a result without derivative, where it is given a tangent (of
    # zeros, which results of scans have): torch alone asserts for jvp(vmap(Function.apply)).
    r"|new_grad_base\.is_floating_point"
    # The one for norms: their third derivative by what requires gradients and counts for nothing.
    "|which is output 0 of MaskedFill, is at version 1"
    # A hook of a value that is given and not used (docs/limits.md).
    r"|unsupported operand type\(s\) for \*: 'NoneType' and 'float'"
    # Gradients lie otherwise where plain autograd trains below a transform (docs/limits.md).
    "|Tensor must have a last dimension with stride 1"
)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def tensors_in(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack([(t.double() * (k + 1)).sin().sum() for k, t in enumerate(parts)]).sum()


# -- ways to call and to differentiate ---------------------------------------------------------------------


def backward(run: Pass, step: dict[str, Any], **options: Any) -> Seen:
    x, y = run.inputs(step)
    with LiveBytes() if step.get("bytes") else contextlib.nullcontext() as live:
        loss = run.loss(x, y)
        seen: Seen = {"value": loss.detach().clone()}
        if live is not None and run.lean and not POLICED.search(run.source):
            seen["at most bytes kept"] = live.bytes
        before = run.model.factor, run.model.on0
        late = step["late"]
        if late:
            run.model.factor, run.model.on0 = 7.0, not run.model.on0
        if loss.requires_grad:
            seen["gradients"] = torch.autograd.grad(loss, run.leaves(x), allow_unused=True, **options)
            if options.get("create_graph"):
                leaves = run.leaves(x)
                first = [g.square().sum() for g in seen["gradients"] if g is not None]
                second = total([*first, sum((0 * leaf).sum() for leaf in leaves)])  # type: ignore[list-item]
                seen["second gradients"] = torch.autograd.grad(second, leaves, allow_unused=True)
            elif options.get("retain_graph"):
                seen["again"] = torch.autograd.grad(loss, run.leaves(x), allow_unused=True)
        if late:
            run.model.factor, run.model.on0 = before
        del loss
        # A gradient may be a view of more.
        seen = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), seen)
        if live is not None and run.lean:
            if options.get("create_graph"):
                gc.collect()  # graphs of gradients may be in cycles
            seen["at most bytes left"] = live.bytes - sum(t.nbytes for t in tensors_in(seen))
    return seen


def partial(run: Pass, step: dict[str, Any]) -> Seen:
    x, y = run.inputs(step)
    loss = run.loss(x, y)
    seen: Seen = {"value": loss.detach()}
    if loss.requires_grad:
        leaves = run.leaves(x)
        for at, some in enumerate((leaves[:1], leaves[1:], leaves)):
            if some:
                seen[f"part {at}"] = torch.autograd.grad(loss, some, allow_unused=True, retain_graph=at < 2)
    return seen


def accumulate(run: Pass, step: dict[str, Any]) -> Seen:
    x, y = run.inputs(step)
    for _ in range(2):
        loss = run.loss(x, y)
        if loss.requires_grad:
            loss.backward()
    seen = {"gradients": [None if t.grad is None else t.grad.clone() for t in run.leaves(x)]}
    run.model.zero_grad()
    return seen


def two_forwards(run: Pass, step: dict[str, Any], reverse: bool = False) -> Seen:
    x, y = run.inputs(step)
    losses = [run.loss(x, y), run.loss(x.detach().cos().requires_grad_(), y)]
    seen: Seen = {"values": [loss.detach() for loss in losses]}
    for at in (1, 0) if reverse else (0, 1):
        if losses[at].requires_grad:
            seen[f"gradients {at}"] = torch.autograd.grad(losses[at], run.leaves(x), allow_unused=True)
    return seen


def drop(run: Pass, step: dict[str, Any]) -> Seen:
    """A forward whose backward never comes."""
    with LiveBytes() as live:
        seen: Seen = {"value": run.loss(*run.inputs(step)).detach().clone()}
        return seen | ({"at most bytes left": live.bytes} if run.lean else {})


def threaded(run: Pass, step: dict[str, Any]) -> Seen:
    def work() -> Seen:
        seeded(3)
        return backward(run, step)

    return _in_a_thread(work)


def _in_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, in another thread."""
    found: list[Any] = []

    def noted() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=noted)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def backward_elsewhere(run: Pass, step: dict[str, Any]) -> Seen:
    """Forward here, backward in another thread."""
    x, y = run.inputs(step)
    loss = run.loss(x, y)
    if not loss.requires_grad:
        return {"value": loss}
    return {"gradients": _in_a_thread(lambda: torch.autograd.grad(loss, run.leaves(x), allow_unused=True))}


def copied(run: Pass, step: dict[str, Any]) -> Seen:
    """A deep copy of the model is called, and the model itself is as it was."""
    model, run.model = run.model, copy.deepcopy(run.model)
    try:
        return {"copy": backward(run, step)}
    finally:
        run.model = model


def no_grad(run: Pass, step: dict[str, Any]) -> Seen:
    with torch.no_grad():
        return {"value": run.loss(*run.inputs(step))}


def again(run: Pass, step: dict[str, Any]) -> Seen:
    """The result goes in once more, before a backward through both."""
    x, y = run.inputs(step)
    # Connected before: where one region's result is no part of the graph, the other's may be.
    loss = run.loss(run.model(x, y).tanh() + 0 * x, y) + sum(
        (0 * leaf.double()).sum() for leaf in run.leaves(x)
    )
    if not loss.requires_grad:
        return {"value": loss}
    return {"gradients": torch.autograd.grad(loss, run.leaves(x), allow_unused=True)}


def update(run: Pass, step: dict[str, Any]) -> Seen:
    """A training step."""
    seen = backward(run, step)
    x, _ = run.inputs(step)
    with torch.no_grad():
        for leaf, g in zip(run.leaves(x), seen.get("gradients", ()), strict=False):
            if g is not None and leaf is not x:
                leaf.sub_(g, alpha=0.01)
    return seen


def batched(run: Pass, step: dict[str, Any]) -> Seen:
    x, y = run.inputs(step)
    loss = run.loss(x, y)
    if not loss.requires_grad:
        return {"value": loss}
    some = torch.eye(2, dtype=loss.dtype)
    pair = torch.stack([loss, loss.sin()])
    return {"rows": torch.autograd.grad(pair, run.leaves(x), some, allow_unused=True, is_grads_batched=True)}


def anomaly(run: Pass, step: dict[str, Any]) -> Seen:
    with torch.autograd.set_detect_anomaly(True):
        return backward(run, step)


def differences(run: Pass, step: dict[str, Any]) -> Seen:
    """Whether the gradient is the slope of the loss: code draws other numbers when it is compiled."""
    x, y = run.inputs(step)
    direction, small = y.cos(), 1e-5
    buffers = [(b, b.clone()) for b in run.model.buffers()]

    def loss(by: float) -> Tensor:
        seeded(5)
        for buffer, before in buffers:
            buffer.copy_(before)
        return run.loss(x + by * direction, y)

    there = loss(0.0)
    if not there.requires_grad:
        return {}
    slope = (torch.autograd.grad(there, x)[0] * direction).sum()
    expected = (loss(small) - loss(-small)) / (2 * small)
    # Nor is it in a program that detaches.
    return {"at most wrong": not torch.allclose(slope, expected, rtol=1e-4, atol=1e-5)}


def forward_ad(run: Pass, step: dict[str, Any]) -> Seen:
    x, y = run.inputs(step)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.detach().cos())
        tangent = torch.autograd.forward_ad.unpack_dual(run.loss(dual, y)).tangent
        seen: Seen = {"tangent": None if tangent is None else tangent.detach(), "gradients": []}
        leaves = run.leaves(x)
        if tangent is not None:
            tangent = tangent + sum((0 * leaf).sum() for leaf in leaves)
            seen["gradients"] = torch.autograd.grad(tangent, leaves, allow_unused=True) if leaves else []
        return seen


def transformed(make: Callable[[Callable[..., Tensor], Pass, Tensor, Tensor], Any]) -> Any:
    """A way by `torch.func`: of a function of x, y and the parameters."""

    def way(run: Pass, step: dict[str, Any]) -> Seen:
        x, y = run.inputs(step)

        def loss(x: Tensor, y: Tensor, parameters: Any = None) -> Tensor:
            out = run.model(x, y) if parameters is None else functional_call(run.model, parameters, (x, y))
            return total([out])

        def derived(x: Tensor, y: Tensor) -> Any:
            return make(loss, run, x, y)

        if run.backend is not None:
            derived = torch.compile(derived, backend=run.backend, fullgraph=True)
        return {"derivatives": derived(x.detach(), y)}

    return way


def hessian(loss: Callable[..., Tensor], run: Pass, x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    """Of a loss by a scale of `x`."""
    return jacfwd(jacrev(scaled(loss, x, y)), randomness=run.randomness)


def parameters(run: Pass) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in run.model.named_parameters()}


def scaled(loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda s: loss(x * s, y)


def plain_over(run: Pass, step: dict[str, Any], of: Callable[..., list[Tensor]]) -> Seen:
    """Plain autograd by the model's leaves over what a transform makes of the loss."""
    x, y = run.inputs(step)
    leaves = run.leaves(x)
    found = of(lambda x: run.loss(x, y), x)
    value = total(found) + sum((0 * leaf.double()).sum() for leaf in leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True) if leaves else []
    return {"derivatives": [t.detach() for t in found], "gradients": grads}


def plain_over_grad(run: Pass, step: dict[str, Any]) -> Seen:
    return plain_over(run, step, lambda loss, x: [grad(loss)(x)])


def plain_over_jvp(run: Pass, step: dict[str, Any]) -> Seen:
    return plain_over(run, step, lambda loss, x: list(jvp(loss, (x,), (x.detach().cos(),))))


def plain_over_vmap(run: Pass, step: dict[str, Any]) -> Seen:
    mapped = lambda loss, x: [vmap(loss, randomness=run.randomness)(torch.stack([x, x.flip(0)]))]  # noqa: E731
    return plain_over(run, step, mapped)


def linearized(loss: Callable[..., Tensor], run: Pass, x: Tensor, y: Tensor) -> Any:
    # Without gradients of the parameters: torch makes a Parameter of a tangent that is constant.
    own = parameters(run)
    # Without folding: what reads written memory by another view is a constant to torch, of before the write.
    as_it_is = lambda graph: lambda *given: pytree.tree_leaves(graph(*given))  # noqa: E731
    step = lambda step: step if step is make_fx else as_it_is  # noqa: E731
    with mock.patch("torch._functorch.eager_transforms.lazy_dynamo_disallow", step):
        out, push = linearize(lambda x: loss(x, y, own), x)
    return out, push(y)


# -- ways around the whole -----------------------------------------------------------------------------------


def around(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Callable[..., Seen]:
    """A backward through the model as `wrap` calls it, and through what escaped besides."""

    def way(run: Pass, step: dict[str, Any]) -> Seen:
        x, y = run.inputs(step)
        loss = total([wrap(run.model)(x, y)]) + sum((0 * t.double()).sum() for t in run.leaves(x))
        run.model.escaped.clear()
        run.model.noted = None
        seen: Seen = {"value": loss.detach().clone()}
        if loss.requires_grad:
            seen["gradients"] = torch.autograd.grad(loss, run.leaves(x), allow_unused=True)
        return seen

    return way


def under_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[..., Seen]:
    def wrap(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return model(*args)

        return call

    return around(wrap)


def counted(run: Pass, step: dict[str, Any]) -> Seen:
    """Under hooks that count: what is packed by a first call is packed by a second one."""
    packs: list[list[Any]] = []
    versions: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        packs[-1].append((tuple(tensor.shape), tensor.dtype))
        versions.setdefault(id(tensor), (tensor, tensor._version))
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unwritten(versions[id(tensor)])
        return tensor

    seen: Seen = {}
    way = under_hooks(pack, unpack)
    for at in range(2):
        packs.append([])
        seen[f"call {at}"] = way(run, step)
    return seen | {"at most unlike": int(packs[0] != packs[1])}


def two_ranks(run: Pass, step: dict[str, Any]) -> Seen:
    """One rank of those that train one model, each on inputs of its own (`tests.bank.ranks` makes the group).

    Its gradients are means over the ranks.
    """
    x, y = run.inputs(step)
    x = (x.detach() + dist.get_rank() / 4).requires_grad_()
    call = run.wrapped
    if call is None:
        learns = any(p.requires_grad for p in run.model.parameters())
        call = run.wrapped = nn.parallel.DistributedDataParallel(run.model) if learns else run.model
    # Every weight counts, if only by zero: a weight without a gradient is another setting of the wrapper.
    loss = total([call(x, y)]) + sum((0 * t.double()).sum() for t in run.leaves(x))
    run.model.escaped.clear()
    run.model.noted = None
    seen: Seen = {"value": loss.detach().clone()}
    if loss.requires_grad:
        loss.backward()
        seen["gradients"] = [None if t.grad is None else t.grad.clone() for t in run.leaves(x)]
    return seen


def inside_checkpoint(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(model, *args, use_reentrant=False)


def with_buffers(transform: Callable[..., Any], copies: int = 0) -> Callable[..., Seen]:
    """`functional_call` with parameters and buffers, which a training step of `torch.func` writes to;
    `copies`: of how many models at once."""

    def way(run: Pass, step: dict[str, Any]) -> Seen:
        x, y = run.inputs(step)
        own, buffers = parameters(run), {name: b.clone() for name, b in run.model.named_buffers()}
        if copies:
            own = {name: torch.stack([p * (1 + 0.1 * k) for k in range(copies)]) for name, p in own.items()}
            buffers = {name: torch.stack([b] * copies) for name, b in buffers.items()}

        def loss(own: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            return total([functional_call(run.model, (own, buffers), (x.detach(), y))])

        return {"derivatives": transform(loss, own, buffers), "buffers": buffers}

    return way


def scanned(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The model as a step of a scan, twice."""
    return lambda x, y: library.SCAN(lambda h: model(h, y), x, 2, "sqrt")


ONES = torch.ones(4, dtype=torch.float64)
WAYS: dict[str, Callable[..., Seen]] = {
    "backward": backward,
    "twice": lambda run, step: backward(run, step, retain_graph=True),
    "double": lambda run, step: backward(run, step, create_graph=True),
    "partial": partial,
    "accumulate": accumulate,
    "two_forwards": two_forwards,
    "reversed": lambda run, step: two_forwards(run, step, reverse=True),
    "drop": drop,
    "thread": threaded,
    "threads": backward_elsewhere,
    "copied": copied,
    "no_grad": no_grad,
    "again": again,
    "update": update,
    "batched": batched,
    "anomaly": anomaly,
    "differences": differences,
    "forward_ad": forward_ad,
    "grad": transformed(lambda loss, run, x, y: grad(loss, (0, 1))(x, y)),
    "grad_params": transformed(lambda loss, run, x, y: grad(loss, (0, 2))(x, y, parameters(run))),
    "vmap_grad": transformed(
        lambda loss, run, x, y: vmap(grad(loss), (0, None), randomness=run.randomness)(
            torch.stack([x, x.flip(0)]), y
        )
    ),
    "vmap_vmap_grad": transformed(
        lambda loss, run, x, y: vmap(
            vmap(grad(loss), (0, None), randomness=run.randomness), (None, 0), 0, run.randomness, chunk_size=1
        )(torch.stack([x, x.flip(0)]), torch.stack([y, y.cos()]))
    ),
    "jvp": transformed(lambda loss, run, x, y: jvp(loss, (x, y), (y, x))),
    "vjp": transformed(lambda loss, run, x, y: vjp(loss, x, y)[1](x.sum())),  # type: ignore
    "hessian": transformed(lambda loss, run, x, y: hessian(loss, run, x, y)(ONES)),
    "jacrev": transformed(lambda loss, run, x, y: jacrev(grad(scaled(loss, x, y)))(ONES)),
    "jacfwd": transformed(
        lambda loss, run, x, y: jacfwd(scaled(loss, x, y), randomness=run.randomness)(ONES)
    ),
    "grad_grad": transformed(lambda loss, run, x, y: grad(lambda x: grad(loss)(x, y).square().sum())(x)),
    "third": transformed(
        lambda loss, run, x, y: grad(lambda s: hessian(loss, run, x, y)(s).square().sum())(ONES)
    ),
    "mixed": transformed(
        lambda loss, run, x, y: grad(lambda p: grad(loss)(x, y, p).square().sum())(parameters(run))
    ),
    "vmap_hessian": transformed(
        lambda loss, run, x, y: vmap(lambda x: hessian(loss, run, x, y)(ONES), randomness=run.randomness)(
            torch.stack([x, x.flip(0)])
        )
    ),
    "linearize": transformed(linearized),
    "plain_over_grad": plain_over_grad,
    "plain_over_jvp": plain_over_jvp,
    "plain_over_vmap": plain_over_vmap,
    "jvp_grad": transformed(lambda loss, run, x, y: jvp(lambda x: grad(loss)(x, y), (x,), (y,))),
    "vmap": transformed(
        lambda loss, run, x, y: vmap(loss, (0, None), randomness=run.randomness)(
            torch.stack([x, x.flip(0)]), y
        )
    ),
    "value_and_grad": transformed(lambda loss, run, x, y: torch.func.grad_and_value(loss, (0, 1))(x, y)),
    "vjp_twice": transformed(lambda loss, run, x, y: twice(vjp(loss, x, y)[1], x.sum())),  # type: ignore
    "grad_vmap": transformed(
        lambda loss, run, x, y: grad(
            lambda x: vmap(loss, (0, None), randomness=run.randomness)(torch.stack([x, x.flip(0)]), y).sum()
        )(x)
    ),
    "buffers": with_buffers(lambda loss, own, buffers: grad(loss)(own, buffers)),
    "buffers_vmap": with_buffers(lambda loss, own, buffers: vmap(grad(loss))(own, buffers), copies=2),
    "buffers_hessian": with_buffers(lambda loss, own, buffers: jacfwd(jacrev(loss))(own, buffers)),
    "buffers_grad": with_buffers(
        lambda loss, own, buffers: grad(lambda p, b: total([g.square() for g in grad(loss)(p, b).values()]))(
            own, buffers
        )
    ),
    "in_checkpoint": around(inside_checkpoint),
    "in_scan": around(scanned),
    "result_written": around(lambda model: lambda *args: model(*args).add_(1)),
    "counted": counted,
    "cloned": under_hooks(lambda t: t.clone(), lambda t: t),
    "on_cpu": around(lambda model: on_cpu(model)),
    "two_ranks": two_ranks,
}
# All but what compares with slopes, in place of numbers, and what needs a group of processes.
IN_ONE_PROCESS = [way for way in WAYS if way not in ("differences", "two_ranks")]


def twice(pull: Callable[..., Any], cotangent: Tensor) -> Any:
    return pull(cotangent), pull(cotangent.cos())


def on_cpu(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(*args)

    return call


# -- the comparison ----------------------------------------------------------------------------------------


# Under a budget, what a first call appends to lists is there once more
# (docs/choosing.md#inspecting-what-is-kept). Where nothing reads the list, all else is compared.
UNDER_A_BUDGET = re.compile(r"\"(" + "|".join(library.PLANNED) + r")\"\)")
READS_A_LIST = re.compile(r"len\(self\.history\)|self\.(shared|escaped)\b")


def shows_looks(source: str) -> bool:
    """Whether a look of the planner shows in what the program computes."""
    return bool(UNDER_A_BUDGET.search(source) and READS_A_LIST.search(source))


# Under torch.func a TorchScript module has other tangents, and derivatives of gradients, in its second call
# and in its third; they are wrong in all but the first: torch's own (2.13, `optimized_execution` or not).
ONCE_SCRIPTED = frozenset(
    "hessian jacrev jacfwd grad_grad third mixed vmap_hessian linearize plain_over_grad plain_over_jvp "
    "jvp_grad jvp forward_ad".split()
)


# Torch calls a Function's own rule with forward mode off, so that a level of it around sees constants (2.13):
# `jvp(jvp(Doubled.apply))` is zero without any region, and other numbers by the order of levels.
FORWARD = frozenset(
    "hessian jacfwd jvp jvp_grad third vmap_hessian linearize plain_over_jvp forward_ad".split()
)
PUSHED_INSIDE = re.compile(r"(?s)(?=.*\b(Doubled|SavesOutput|Twin)\.apply)(?=.*func\.(jvp|jacfwd|hessian))")


def check(subject: Subject, steps: list[dict[str, Any]], dtype: torch.dtype, **options: Any) -> Verdict:
    """Run a program both ways, step by step, up to the first that differs or cannot be run."""
    with nan_where_nobody_wrote(options.get("backend")):
        return _checked(subject, steps, dtype, **options)


def _checked(
    subject: Subject,
    steps: list[dict[str, Any]],
    dtype: torch.dtype,
    backend: str | None = None,
    seed: int = 0,
) -> Verdict:
    source = subject.text
    if shows_looks(source):
        return Verdict("invalid", "a look of the planner is one more call, which lists of the user's show")
    again = "torch.func." in source or not ONCE_SCRIPTED.isdisjoint(step["how"] for step in steps)
    if "self.scripted" in source and again:
        return Verdict("invalid", "torch's derivatives of TorchScript depend on the number of calls")
    if PUSHED_INSIDE.match(source) and not FORWARD.isdisjoint(step["how"] for step in steps):
        return Verdict("invalid", "torch's second tangents of a Function are those of a constant")
    plain, ours = (Pass(subject, dtype, wanted, backend if wanted else None) for wanted in (False, True))
    plain.streams = ours.streams = backend is None
    tolerance = subject.tolerance or (1e-4 if dtype is torch.float32 else 1e-9)
    # Compiled code draws other numbers, and adds up in another order.
    tolerance = tolerance if backend is None else 1e-6
    for at, step in enumerate(steps):
        # A weight that is cast once for all its uses has its gradients added up in bfloat16.
        allowed = 2e-2 if step.get("autocast") else tolerance
        library.lookup.cache_clear()
        try:
            expected = plain.run(step, seed + at)
        except Exception as error:
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        library.lookup.cache_clear()
        try:
            found = ours.run(step, seed + at)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            said = str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {error}"
            connected = re.search(r"torch\.func|SCAN|LOOP", source) and OF_TRANSFORMS.search(str(error))
            own = TORCHS.search(str(error)) or connected
            # What Dynamo or AOTAutograd refuse is loud; the comparison is after wrong numbers.
            if backend is not None and not _compiled_alone(subject, steps[: at + 1], dtype, backend, seed):
                return Verdict("refused", f"torch.compile alone runs it. {said}")
            if own or backend is not None or isinstance(error, RematError):
                return Verdict("refused", said)
            if STANDING.search(str(error)):
                return Verdict("standing", f"{type(error).__name__}: {error}")
            return Verdict("failed", f"step {at} raises {type(error).__name__}: {error}")
        if (what := difference(found, expected, allowed)) is not None:
            if backend is not None and (
                own := _compiled_alone(subject, steps[: at + 1], dtype, backend, seed)
            ):
                return Verdict("invalid", f"torch.compile without regions: {own}")
            return Verdict("failed", f"step {at}, {what}")
        if ours.ours and at == len(steps) - 1 and backend is None:
            # The next ordinary call: nothing is left of regions in the model.
            ours.ours = False
            steps = [*steps, step]
            library.lookup.cache_clear()
            try:
                expected = plain.run(step, seed - 1)
            except Exception:
                continue  # The program keeps a graph whose backward has run.
            library.lookup.cache_clear()  # what torch.func made is of levels that are gone
            try:
                found = ours.run(step, seed - 1)
            except Exception as error:
                # What a region has stored with its graph goes with its other results (docs/limits.md).
                kind = "standing" if "through the graph a second time" in str(error) else "failed"
                return Verdict(kind, f"the next ordinary call raises {type(error).__name__}: {error}")
            if (what := difference(found, expected, allowed)) is not None:
                return Verdict("failed", f"the next ordinary call, {what}")
    return Verdict("same")


def difference(found: Any, expected: Any, tolerance: float, where: str = "") -> str | None:
    """Where two observations differ; None where they do not."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(found) != list(expected):
            return f"{where}: {list(found)} instead of {list(expected)}"
        pairs = [(f"{where} {key}".strip(), found[key], expected[key]) for key in expected]
    elif isinstance(expected, (tuple, list)) and isinstance(found, (tuple, list)):
        if len(found) != len(expected):
            return f"{where}: {len(found)} values instead of {len(expected)}"
        pairs = [(f"{where}[{k}]", *both) for k, both in enumerate(zip(found, expected, strict=True))]
    else:
        return (
            None if _equal(found, expected, tolerance, where) else f"{where}: {found} instead of {expected}"
        )
    for name, one, other in pairs:
        if (what := difference(one, other, tolerance, name)) is not None:
            return what
    return None


def _equal(found: Any, expected: Any, tolerance: float, where: str) -> bool:
    if "at most" in where:
        return found <= expected
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        alike = found.shape == expected.shape and found.dtype == expected.dtype
        return alike and torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if found is None or expected is None:
        # Zero and "not connected" are told apart by plain autograd alone.
        other = expected if found is None else found
        return other is None or (isinstance(other, Tensor) and not other.any())
    return bool(found == expected)


def _compiled_alone(
    subject: Subject, steps: list[dict[str, Any]], dtype: torch.dtype, backend: str, seed: int
) -> str | None:
    """What torch.compile itself makes of a program otherwise than eager; None where it is right."""
    torch._dynamo.reset()
    eager, alone = (Pass(subject, dtype, False, how) for how in (None, backend))
    eager.streams = alone.streams = False
    for at, step in enumerate(steps):
        expected = eager.run(step, seed + at)
        try:
            what = difference(alone.run(step, seed + at), expected, 1e-6)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
        if what is not None:
            return what
    return None
