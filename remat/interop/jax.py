"""JAX's names for what this library does, for people who port code.

    from remat import jax_names as jax      # in place of `import jax`
    from remat.interop.jax import checkpoint_name

    @jax.checkpoint(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def block(params, x): ...

What has no meaning here is accepted and said so below; docs/from-torch.md#from-jax compares the two libraries
behaviour by behaviour.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from remat._api import remat as _remat
from remat._core import Decision, OpInfo
from remat._inspect import print_saved_residuals as print_saved_residuals, saved_residuals as saved_residuals
from remat._names import checkpoint_name as checkpoint_name
from remat.policies import (
    Policy,
    as_policy,
    makes_policies,
    offload,
    save_all_but_names,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_weight_matmuls,
)
from remat.transforms import RematError

Saveable = Decision.SAVE
Recompute = Decision.RECOMPUTE
Offloadable = Decision.OFFLOAD


class PortingError(RematError, ValueError):
    """Arguments that JAX refuses too, or that name a memory that torch does not have.

    Example:
        >>> from remat import jax_names as jax
        >>> try:
        ...     jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "disk")
        ... except jax.PortingError as error:
        ...     print("pinned_host" in str(error))
        True
    """


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: Any = True,
    concrete: bool = False,
    policy: Any = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """`jax.checkpoint`, which is `remat.remat` with JAX's argument names.

    Args:
        fun: the function; left out, this is a decorator (in JAX it may not be left out).
        prevent_cse: accepted, and without effect: there is nothing to prevent in eager mode, and under
            torch.compile recomputation is always protected.
        concrete: False, as in JAX, which has dropped it; True raises and says what to write.
        policy: None recomputes everything. A policy of `checkpoint_policies`, or a function of one `OpInfo`.
            A function of JAX's primitive, avals and parameters raises.
        static_argnums, static_argnames: as in `remat.remat`; values need not be hashable.

    Example:
        >>> import torch
        >>> from remat import jax_names as jax
        >>> sin = jax.checkpoint(torch.sin, policy=jax.checkpoint_policies.dots_saveable)
        >>> torch.func.grad(sin)(torch.tensor(0.0))
        tensor(1.)
    """
    del prevent_cse
    if concrete:
        raise PortingError(
            "checkpoint(concrete=True): JAX has dropped this option too. Write static_argnums=... for the "
            "arguments that Python branches on; in eager code it may branch on tensors as well."
        )
    return _remat(fun, policy=policy, static_argnums=static_argnums, static_argnames=static_argnames)  # type: ignore[call-overload]


remat = checkpoint
"""Another name of `checkpoint`, as in JAX.

Example:
    >>> from remat import jax_names as jax
    >>> jax.remat is jax.checkpoint
    True
"""


@dataclass(frozen=True, repr=False)
class SaveAnyNamesBut(Policy):
    """Saves the values that have a name, except for some names; values without a name are recomputed."""

    barred: frozenset[str]

    def __call__(self, info: OpInfo) -> Decision:
        named = info.name is not None and info.name not in self.barred
        return Decision.SAVE if named else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"save_any_names_but_these({', '.join(map(repr, sorted(self.barred)))})"


@makes_policies
def save_any_names_but_these(*names: str) -> Policy:
    """Save named values but these; recompute values without a name."""
    return SaveAnyNamesBut(frozenset(names))


@makes_policies
def save_only_these_names(*names: str) -> Policy:
    """`remat.save_names`; without names, `remat.save_nothing`."""
    return save_names(*names) if names else save_nothing


@makes_policies
def save_anything_except_these_names(*names: str) -> Policy:
    """`remat.save_all_but_names`. A value barred here is really recomputed, which JAX does not promise."""
    return save_all_but_names(*names) if names else save_everything


@makes_policies
def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """`save_names(...) | offload(save_names(...))`.

    Raises:
        RematError: a name in both lists, or other memories than "device" and "pinned_host" (also a
            ValueError).
    """
    saved, offloaded = set(names_which_can_be_saved), set(names_which_can_be_offloaded)
    if both := saved & offloaded:
        raise PortingError(
            "The names should be exclusive and should not intersect in names_which_can_be_saved and "
            f"names_which_can_be_offloaded. Got names_which_can_be_saved={sorted(saved)}, "
            f"names_which_can_be_offloaded={sorted(offloaded)} and the intersection={sorted(both)}"
        )
    _check_memories(offload_src, offload_dst)
    policy = save_only_these_names(*sorted(saved))
    return policy | offload(save_names(*sorted(offloaded))) if offloaded else policy


@makes_policies
def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """`offload(save_weight_matmuls)`."""
    _check_memories(offload_src, offload_dst)
    return offload(save_weight_matmuls)


@makes_policies
def save_from_both_policies(policy_1: Any, policy_2: Any) -> Policy:
    """`policy_1 | policy_2`: what either saves; unlike in JAX they may offload, too."""
    return as_policy(policy_1) | policy_2


def _check_memories(source: str, destination: str) -> None:
    if (source, destination) != ("device", "pinned_host"):
        raise PortingError(
            f"offload_src={source!r}, offload_dst={destination!r}: values move from their device to pinned "
            "host memory; write offload_src='device', offload_dst='pinned_host'."
        )


# The names of JAX's classes of policies.
SaveOnlyTheseNames = save_only_these_names
SaveAnyNamesButThese = save_any_names_but_these
SaveAnythingExceptTheseNames = save_anything_except_these_names
SaveAndOffloadOnlyTheseNames = save_and_offload_only_these_names
SaveFromBothPolicies = save_from_both_policies
OffloadDotWithNoBatchDims = offload_dot_with_no_batch_dims


class _JaxPolicies(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        near = difflib.get_close_matches(name, vars(self), n=1)
        hint = f": did you mean {near[0]}?" if near else f"; it has {', '.join(vars(self))}"
        raise AttributeError(f"checkpoint_policies has no {name!r}{hint}")


checkpoint_policies = _JaxPolicies(
    everything_saveable=save_everything,
    nothing_saveable=save_nothing,
    dots_saveable=save_matmuls,
    checkpoint_dots=save_matmuls,
    dots_with_no_batch_dims_saveable=save_weight_matmuls,
    checkpoint_dots_with_no_batch_dims=save_weight_matmuls,
    offload_dot_with_no_batch_dims=offload_dot_with_no_batch_dims,
    save_only_these_names=save_only_these_names,
    save_any_names_but_these=save_any_names_but_these,
    save_anything_except_these_names=save_anything_except_these_names,
    save_and_offload_only_these_names=save_and_offload_only_these_names,
    save_from_both_policies=save_from_both_policies,
    SaveOnlyTheseNames=SaveOnlyTheseNames,
    SaveAnyNamesButThese=SaveAnyNamesButThese,
    SaveAnythingExceptTheseNames=SaveAnythingExceptTheseNames,
    SaveAndOffloadOnlyTheseNames=SaveAndOffloadOnlyTheseNames,
    SaveFromBothPolicies=SaveFromBothPolicies,
    OffloadDotWithNoBatchDims=OffloadDotWithNoBatchDims,
)
"""The policies of `jax.checkpoint_policies`, as values of this library.

Example:
    >>> from remat import jax_names as jax
    >>> jax.checkpoint_policies.dots_saveable
    save_matmuls
"""

ad_checkpoint = SimpleNamespace(
    checkpoint=checkpoint,
    remat=checkpoint,
    checkpoint_name=checkpoint_name,
    checkpoint_policies=checkpoint_policies,
    print_saved_residuals=print_saved_residuals,
    saved_residuals=saved_residuals,
)
"""What `jax.ad_checkpoint` has, for code that names it."""
