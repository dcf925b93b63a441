"""One process of test_layout: what a rank keeps of a step whose plan was made beforehand."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.mesh import Decoder, Sizes, tensor_parallel
from benchmarks.suite.dry import Live
from remat import RematError, nn as remat_nn
from tests.inside import trace_memory

SIZES = Sizes(layers=4, width=128, heads=8, groups=4, hidden=256, vocab=512)
ROWS, LENGTH = 2, 128


def start(rank: int, path: str, world: int = 2) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SIZES, LENGTH)


def kept(step: Any) -> int:
    """Bytes alive where `step(mark)` marks, in the second of two steps."""
    step(lambda: None)
    time.sleep(0.1)  # until gloo's thread is done: what it frees later would be missed in the second step
    return trace_memory(step).kept


class Alive(Live):
    """Bytes of what is alive, of local tensors.

    The profiler cannot tell under tensor parallelism. What a collective reads may go where gloo's thread is
    done with it, after the rank itself has let go of it, and the profiler does not see that thread.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if "_wrap_tensor" in str(func):  # it makes a wrapper, which has no memory
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def write(path: str, rank: int, text: object) -> None:
    with open(f"{path}/{rank}.txt", "w") as file:
        json.dump(text, file)


def sharded(rank: int, path: str, ranks: int) -> None:
    """FSDP2: writes down what the rank keeps, with a plan and without."""
    from torch.distributed.fsdp import fully_shard

    start(rank, path, ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(rank)
    tokens = torch.randint(0, SIZES.vocab, (ROWS, LENGTH))

    def run(plan: str | None) -> tuple[int, list[torch.Tensor]]:
        ours = model()
        if plan is not None:
            remat_nn.apply(ours, plan=plan)
        for layer in ours.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(ours, mesh=mesh)

        def step(mark: Any) -> None:
            ours.zero_grad()
            out = ours(tokens)
            mark()
            out.square().mean().backward()

        size = kept(step)
        return size, [p.grad.to_local() for p in ours.parameters()]  # type: ignore

    # The middle one of three. On a busy machine gloo's thread lets go of a layer's parameters late: the
    # profiler takes them for kept, or, if they are of an earlier profile, counts them as freed in this one.
    (size, got), (plain, expected) = (
        sorted((run(plan) for _ in range(5)), key=lambda found: found[0])[2]
        for plan in (f"{path}/plan.json", None)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    write(path, rank, (size, plain))
    dist.destroy_process_group()


def spread(rank: int, path: str) -> None:
    """Tensor parallelism: writes down what the rank keeps, with a plan and without."""
    start(rank, path)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % SIZES.vocab

    def run(plan: str | None) -> tuple[list[int], list[torch.Tensor]]:
        ours, sizes = model(), []
        tensor_parallel(ours, mesh)
        if plan is not None:
            remat_nn.apply(ours, plan=plan)
        for _ in range(3):
            ours.zero_grad()
            with Alive() as alive:
                out = ours(tokens)
            time.sleep(0.1)  # until gloo's thread is done
            sizes.append(alive.alive)
            out.square().mean().backward()
        return sizes, [p.grad.to_local() for p in ours.parameters()]  # type: ignore

    (sizes, got), (plain, expected) = run(f"{path}/plan.json"), run(None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    write(path, rank, (sizes, plain))
    dist.destroy_process_group()


def piped(rank: int, path: str, microbatches: int) -> None:
    """Two stages under 1F1B: writes down what a rank keeps where its first backward begins."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    start(rank, path)
    ours = model()
    names = list(ours.layers)
    for name in names[2:] if rank == 0 else names[:2]:
        del ours.layers[name]
    if rank == 0:
        ours.norm = ours.output = None
    else:
        ours.tok_embeddings = None
    remat_nn.apply(ours, plan=f"{path}/plan.json")
    tokens = torch.randint(0, SIZES.vocab, (ROWS * microbatches, LENGTH))

    def step(mark: Any) -> None:
        # A stage allocates what it receives into in its first step.
        stage = PipelineStage(ours, rank, 2, torch.device("cpu"))
        seen = 0

        def ended(*_: Any) -> None:
            nonlocal seen
            seen += 1
            # Each stage runs once before, to learn the shapes; then the first has two microbatches in flight.
            if seen == (3 if rank == 0 else 2):
                mark()

        handle = ours.register_forward_hook(ended)
        schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda out, target: out.square().mean())
        given: Any = {"target": tokens} if rank else {}
        schedule.step(*([] if rank else [tokens]), **given)
        handle.remove()

    write(path, rank, (kept(step),))
    dist.destroy_process_group()


def told(run: Callable[[], Any]) -> str:
    """The error that a run ends in, "nothing" if it ends well."""
    try:
        run()
    except RematError as error:
        return str(error)
    return "nothing"


def disagreeing(rank: int, path: str, sizes: Sizes) -> None:
    """Each rank has a plan of its own: writes down what it is told."""
    start(rank, path)
    said = told(lambda: remat_nn.apply(Decoder(sizes, 16), plan=f"{path}/{rank}.json"))
    write(path, rank, said.split(" (")[0])
    dist.destroy_process_group()


def other_ops(rank: int, path: str, sizes: Sizes) -> None:
    """One rank's block runs another op: writes down what each rank is told in the first forward."""
    start(rank, path)
    ours: Any = Decoder(sizes, 16)
    remat_nn.apply(ours, plan=f"{path}/0.json")
    if rank == 1:
        ours.layers["1"].feed_forward.forward = torch.nn.functional.gelu
    write(path, rank, told(lambda: ours(torch.zeros(2, 16, dtype=torch.long))))
    dist.destroy_process_group()


def other_mesh(rank: int, path: str, sizes: Sizes) -> None:
    """One rank leaves its blocks gathered: writes down what each rank is told in the first forward."""
    from torch.distributed.fsdp import fully_shard

    start(rank, path)
    ours = remat_nn.apply(Decoder(sizes, 16), plan=f"{path}/plan.json")
    for layer in ours.layers.values():
        fully_shard(layer, reshard_after_forward=rank == 0)
    fully_shard(ours)
    write(path, rank, told(lambda: ours(torch.zeros(2, 16, dtype=torch.long))))
    dist.destroy_process_group()
