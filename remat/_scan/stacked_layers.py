"""Identical layers with stacked parameters, run as one scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from remat._scan.scan import scan_remat
from remat.policies import save_nothing
from remat.schedules import Schedule
from remat.transforms import WrongValue, map_leaves

Params = dict[str, torch.Tensor]


def scan_layers(
    block: Callable[..., Any],
    stacked_params: Any,
    x: Any,
    *args: Any,
    policy: Any = save_nothing,
    checkpoints: str | int | Schedule = "all",
    **options: Any,
) -> Any:
    """Apply L identical blocks, `x = block(params[l], x, *args)`, keeping layer inputs as `checkpoints` says.

    Args:
        block: a function of (params, x, *args), or an `nn.Module` of one layer. A module runs with
            `torch.func.functional_call`, so its own parameters are not used.
        stacked_params: a pytree whose tensors have shape [L, ...], as `stack_params` makes it.
        x: the first layer's input, any pytree; every layer returns the same structure, shapes and dtypes.
        args: what every layer gets besides (masks, positions), differentiated too.
        policy: what a layer keeps beside its input (see `scan_remat`).
        checkpoints: which layer inputs are kept; here by default all of them.
        options: further arguments of `scan_remat`.

    Returns:
        The last layer's output.

    Example:
        >>> import torch
        >>> from remat import scan_layers, stack_params
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        >>> scan_layers(blocks[0], stack_params(blocks), torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    apply, module = block, isinstance(block, torch.nn.Module)
    if module:

        def apply(params: Any, x: Any, *args: Any) -> Any:
            return torch.func.functional_call(block, params, (x, *args))  # type: ignore[arg-type]

    def body(x: Any, params: Any) -> tuple[Any, None]:
        return apply(params, x, *args), None

    if module and not torch.compiler.is_dynamo_compiling():
        # Its own parameters are not captured: others stand in their place.
        own = (*block.parameters(), *block.buffers())  # type: ignore[attr-defined]
        body.replaced = frozenset(map(id, own))  # type: ignore[attr-defined]
    return scan_remat(body, x, stacked_params, policy=policy, checkpoints=checkpoints, **options)[0]


def stack_params(modules: Iterable[torch.nn.Module]) -> Params:
    """Parameters and buffers of identical modules, stacked along a new first axis.

    The keys are those of one module's `state_dict`. The stack is differentiable: gradients of the stacked
    tensors reach the modules' parameters. For training on the stack itself, detach and `requires_grad_` it,
    and write it back with `unstack_params`.

    Args:
        modules: at least one module; all have the same names, shapes and dtypes.

    Raises:
        RematError: (also a `ValueError`) no modules, or modules that differ (says where).

    Example:
        >>> import torch
        >>> from remat import stack_params
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))
        >>> {name: tuple(t.shape) for name, t in stack_params(blocks).items()}
        {'weight': (3, 2, 4), 'bias': (3, 2)}
    """
    states = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
    if not states:
        raise WrongValue("stack_params: got no modules.")
    first = states[0]
    for i, state in enumerate(states):
        if state.keys() != first.keys():
            odd = sorted(state.keys() ^ first.keys())
            raise WrongValue(
                f"stack_params: module {i} differs from module 0 in its parameters: {', '.join(odd)}."
            )
        for name, tensor in state.items():
            if (tensor.shape, tensor.dtype) != (first[name].shape, first[name].dtype):
                raise WrongValue(
                    f"stack_params: {name!r} is {tensor.dtype} {tuple(tensor.shape)} in module {i} and "
                    f"{first[name].dtype} {tuple(first[name].shape)} in module 0; only identical layers "
                    f"can be stacked."
                )
    return {name: torch.stack([state[name] for state in states]) for name in first}


def unstack_params(
    stacked: Mapping[str, torch.Tensor],
    modules: Sequence[torch.nn.Module] | torch.nn.ModuleList | None = None,
) -> list[Params]:
    """One state dict a layer from stacked parameters; with `modules`, loaded into them as well.

    Args:
        stacked: name -> tensor of shape [L, ...].
        modules: L modules to load into, in order.

    Raises:
        RematError: (also a `ValueError`) tensors of different L, another number of modules, other names
            or shapes.

    Example:
        >>> import torch
        >>> from remat import stack_params, unstack_params
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))
        >>> unstack_params(stack_params(blocks))[2]["bias"].equal(blocks[2].bias)
        True
    """
    counts = {name: tensor.shape[0] for name, tensor in stacked.items()}
    if len(set(counts.values())) != 1:
        raise WrongValue(f"unstack_params: the numbers of layers differ: {counts}.")
    count = next(iter(counts.values()))
    layers = [map_leaves(lambda t, i=i: t[i], dict(stacked)) for i in range(count)]
    if modules is not None:
        if len(modules) != count:
            raise WrongValue(f"unstack_params: got {count} layers of parameters and {len(modules)} modules.")
        for module, state in zip(modules, layers, strict=True):
            _load(module, state)
    return layers


def _load(module: torch.nn.Module, state: Params) -> None:
    # Not load_state_dict: it knows no buffers that are not persistent, and wants tied parameters twice.
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    odd = [
        k
        for k in own.keys() | state.keys()
        if k not in own or k not in state or own[k].shape != state[k].shape
    ]
    if odd:
        raise WrongValue(
            f"unstack_params: names or shapes differ from the module's: {', '.join(sorted(odd))}."
        )
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
