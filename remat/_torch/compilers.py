"""Private names of torch's compilers that reports, plans and what Dynamo traces ask for.

Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite, unless a line says otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def compiled_for_graphs(
    fn: Callable[..., Any],
    joint: Callable[[torch.fx.GraphModule], None],
    final: Callable[[torch.fx.GraphModule], None],
) -> Callable[..., Any]:
    """`fn`, compiled as far as Inductor's partitioner and decompositions go; the graphs are shown and then
    run as they are.

    `joint` sees each graph of forward and backward before it is partitioned. `final` sees each graph that
    would go to code generation. Both see a graph without a backward.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def partition(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        module.graph.eliminate_dead_code()
        joint(module)
        return min_cut_rematerialization_partition(module, inputs, compiler="inductor", **options)

    def show(module: torch.fx.GraphModule, _: Any) -> Any:
        final(module)
        return make_boxed_func(module.forward)

    def show_whole(module: torch.fx.GraphModule, inputs: Any) -> Any:
        module.graph.eliminate_dead_code()
        joint(module)
        return show(module, inputs)

    backend = aot_autograd(
        fw_compiler=show,
        bw_compiler=show,
        inference_compiler=show_whole,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return torch.compile(fn, backend=backend, fullgraph=True)


def hooks_guarded() -> contextlib.AbstractContextManager[Any]:
    """Within, Dynamo compiles again for a module that has got a hook, which it ignores otherwise."""
    from torch._dynamo import config

    return config.patch(skip_nnmodule_hook_guards=False)


def dynamo_errors() -> type[Exception]:
    """What Dynamo raises where it cannot trace a function."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def bypassing_wrapper() -> Callable[..., Any]:
    """The operator that lets Dynamo trace a function while we decide, at AOT-trace time, how it runs.

    Dynamo has no public way to call a function of ours on a graph it made. (2.14.1 too)
    """
    from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper

    return dynamo_bypassing_wrapper


def partitioner_choice(
    module: torch.fx.GraphModule, results: int, held: list[int], budget: float, solver: str
) -> list[str]:
    """Names of the nodes that torch's min-cut partitioner would save, without extracting the two halves.

    `min_cut_rematerialization_partition` up to the point where the choice is made; `results` counts the
    forward outputs, `held` are positions of the placeholders that are parameters.
    """
    from torch._functorch import config, partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    info = partitioners.classify_nodes(module, held, results)
    for node in reversed(module.graph.nodes):
        if node.op == "output":
            node.dist_from_bw = int(1e9)
        elif not info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])
    with config.patch(activation_memory_budget_solver=solver):
        return [
            node.name
            for node in partitioners.choose_saved_values_set(module.graph, info, memory_budget=budget)
        ]


def as_inductor_gets_it(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A joint graph in the ops that Inductor's partitioner is asked about: norms and dropout in parts."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    given = module.graph.find_nodes(op="placeholder")
    with torch.no_grad():
        made = make_fx(module, decomposition_table=select_decomp_table())(*[n.meta["val"] for n in given])
    # The partitioner knows tangents by their names.
    for node, old in zip(made.graph.find_nodes(op="placeholder"), given, strict=True):
        node.target = old.target
    return made
