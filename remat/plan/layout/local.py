"""What one rank of tensor and expert parallelism runs: a copy of the model, on fakes of local shapes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat._torch import fake_mesh
from remat.plan.layout.layout import Layout
from remat.transforms import RematError, flatten, local_tensors, unflatten, wraps
from remat.transforms.compat import fake_mode


@dataclass(frozen=True)
class Weight:
    """A parameter of a rank, before FSDP2 shards it.

    Attributes:
        owner: the qualified name of its module.
        shape: of all ranks together.
        local: of this rank.
        dtype: that it is stored in.
        trained: whether it has a gradient.
        expert: whether it is spread over the ranks of `ep`.
        number: the same for parameters that are tied.
    """

    owner: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    expert: bool
    number: int


@dataclass(frozen=True)
class Local:
    """The local program: modules to call, and the parameters by their qualified names.

    Attributes:
        model: the copy.
        weights: every place of a parameter; tied ones are there more than once.
        groups: sizes of the process groups, by name.
    """

    model: torch.nn.Module
    weights: dict[str, Weight]
    groups: dict[str, int]
    _mode: Any

    def arguments(self, args: Any, dtype: torch.dtype | None) -> Any:
        """Arguments as fakes, floats in the dtype that parameters are gathered in."""
        leaves, spec = flatten(args)
        made = [_fake(x, self._mode, dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
        return unflatten(made, spec)

    @contextlib.contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Within, ops run on fakes."""
        with self._mode, torch.enable_grad():
            yield


@contextlib.contextmanager
def local_program(model: torch.nn.Module, layout: Layout) -> Iterator[Local]:
    """The program of the first rank of its stage, all stages in one; it is not to be used afterwards.

    Raises:
        RematError: the model is spread already, a process group is there, or nothing says how to spread it.
    """
    ours = _copied(model)
    sizes = {name: size for name, size in (("ep", layout.ep), ("tp", layout.tp)) if size > 1}
    with _mesh(sizes) as mesh:
        groups: dict[str, int] = {}
        if mesh is not None:
            groups = {mesh.get_group(name).group_name: size for name, size in sizes.items()}
            _spread(ours, mesh, layout)
        mode = fake_mode([])
        weights = _weights(ours)
        _on_fakes(ours, mode, layout.param_dtype)
        yield Local(ours, weights, groups, mode)


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy on the meta device; regions in it are ordinary modules."""
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if wraps(tensor):
            raise RematError(
                f"remat.fit(mesh=...): {name} is a DTensor. Give the model before it is spread; "
                "Layout(parallelize=...) says how it will be."
            )
        empty = torch.empty_like(tensor.detach(), device="meta")
        parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if parameter else empty
    ours = copy.deepcopy(model, memo)
    for module in ours.modules():
        if (plain := getattr(type(module), "_remat_class", None)) is not None:
            module.__class__ = plain
    return ours


def _mesh(sizes: Mapping[str, int]) -> contextlib.AbstractContextManager[Any]:
    if not sizes:
        return contextlib.nullcontext()
    if torch.distributed.is_initialized():
        raise RematError(
            "remat.fit(mesh=...) with tp or ep needs a process group of its own, and this process is in "
            'one. Plan in a process alone, plan.save("plan.json"), and load that in every rank.'
        )
    return fake_mesh(sizes)


def _spread(model: torch.nn.Module, mesh: Any, layout: Layout) -> None:
    """Tensor and expert parallelism, in place."""
    plan = layout.parallelize
    if plan is None:
        plan = _plan_of(model)
    if isinstance(plan, Mapping):
        from torch.distributed.tensor.parallel import parallelize_module

        if layout.tp == 1:
            raise RematError("Layout(ep=...): write a function of model and mesh as parallelize=..., too.")
        parallelize_module(model, mesh["tp"], dict(plan))
    else:
        plan(model, mesh)


def _plan_of(model: torch.nn.Module) -> dict[str, Any]:
    """The plan that a Hugging Face model brings along, for `parallelize_module`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    found = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not found:
        raise RematError(
            f"Layout(tp=...): nothing says how {type(model).__name__} is spread. Write "
            "Layout(parallelize={...}) as for torch.distributed.tensor.parallel.parallelize_module, or a "
            "function of model and mesh."
        )
    if unknown := sorted({str(style) for style in found.values()} - styles.keys()):
        raise RematError(
            f"The plan that {type(model).__name__} brings along has {unknown[0]!r}, which is not one of "
            f"{', '.join(styles)}: write Layout(parallelize=...)."
        )
    return {name: styles[style]() for name, style in found.items()}


def _weights(model: torch.nn.Module) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    numbers: dict[int, int] = {}
    for owner, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            part = next(local_tensors([tensor]))
            names = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None) or ()
            spread = zip(names, getattr(tensor, "placements", ()), strict=False)
            found[f"{owner}.{name}" if owner else name] = Weight(
                owner=owner,
                shape=tuple(tensor.shape),
                local=tuple(part.shape),
                dtype=tensor.dtype,
                trained=tensor.requires_grad,
                expert=any(dim == "ep" and placed.is_shard() for dim, placed in spread),
                number=numbers.setdefault(id(tensor), len(numbers)),
            )
    return found


def _on_fakes(model: torch.nn.Module, mode: Any, dtype: torch.dtype | None) -> None:
    """Put fakes in the place of all tensors that modules hold."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, mode, dtype)
        return made[id(tensor)]

    # The originals stay alive meanwhile: identities are only good that long.
    modules = [(module, dict(vars(module)), dict(module._parameters)) for module in model.modules()]
    for module, others, parameters in modules:
        for name, tensor in parameters.items():
            if tensor is not None:
                module._parameters[name] = fake(tensor, dtype)  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer, None)
        for name, value in others.items():
            if isinstance(value, torch.Tensor):
                vars(module)[name] = fake(value, None)


def _fake(tensor: torch.Tensor, mode: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """A fake of a rank's part, on the CPU, whose kernels are there; the dtype is for floats only."""
    part = next(local_tensors([tensor]))
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with torch.no_grad():
        with mode:
            made = torch.empty_strided(part.shape, part.stride(), dtype=wanted, device="cpu")
        if part is not tensor:
            from torch.distributed.tensor import DTensor

            assert isinstance(tensor, DTensor)
            options: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
            with mode:
                made = DTensor.from_local(made, tensor.device_mesh, tensor.placements, **options)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
