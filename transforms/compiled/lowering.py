"""How a region's primitives run when they are written out in a graph that is being traced.

Recording and replaying are those of eager, made simple: what nobody reads is dead code that the compiler
drops, so nothing is skipped or freed here. Values that the selector keeps stay values of the graph.
Everything that a recomputation starts from passes a fence (`compiled.barrier_placement` says what that is).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.transforms.compat import as_it_is, graph_storage, tagged
from remat.transforms.compiled.barrier import GraphDedup, fence, fence_below, snapshot
from remat.transforms.compiled.record import GraphRecord, GraphReplay
from remat.transforms.compiled.turns import RECOMPUTED, Late, Turn, nodes_of
from remat.transforms.context import quiet, ranks_met, recordings
from remat.transforms.errors import RematError
from remat.transforms.functorch import Prim, PullBack, replaying
from remat.transforms.region import Region, agree_traced

Tensors = Sequence[torch.Tensor]
_serials = itertools.count()


class GraphLowering:
    """Runs primitives at the bottom of the functorch levels (a `functorch.World`).

    Args:
        region: whose primitives.
        alike: how to copy others of the graph, or to be copied.
    """

    def __init__(self, region: Region, alike: GraphDedup | None = None) -> None:
        self.tags = {RECOMPUTED: f"{next(_serials)} {region.name}"}
        self.alike = alike or GraphDedup()

    def forward(self, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
        """Run a region; with a node above it that will pull back, note what its recomputation needs."""
        if not prim.sinks:
            return tuple(prim.body(*operands))
        run = functools.partial(self._forward, prim, operands)
        record, outs = run() if prim.mapped else self.alike.forward(operands, prim.masks, run)
        for sink in prim.sinks:
            sink.written = record
        if outs and (sent := record.sent()):
            # Or what is sent would stay until the forward ends, or be sent in the backward.
            outs = [quiet(fence_below, outs[0], [value.host for value in sent]), *outs[1:]]
        # Autograd sees the node make them. AOTAutograd would see how functionalization came to them, views
        # and detached values, and make them so once more, without the node.
        memory = [graph_storage(t) for t in outs]
        alone = [memory.count(m) == 1 and m not in record.given for m in memory]
        made = tuple([as_it_is(t) if own else t for t, own in zip(outs, alone, strict=True)])
        record.results = nodes_of(made)
        for around in recordings():
            if isinstance(around, GraphRecord):
                around.origins.renamed(outs, made)
        return made

    @staticmethod
    def _forward(prim: Prim, operands: Tensors) -> tuple[GraphRecord, Tensors]:
        region = prim.family.region
        record = GraphRecord(region, operands)
        selector = record.selector
        record.tape.loose = prim.dual
        graded = [t.requires_grad for t in operands]
        with selector.watching(levels=True) if selector else contextlib.nullcontext(), record:
            try:
                outs = (prim.recorded or prim.body)(*operands)
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                raise RematError(record.refusal("an op", f"through which gradients flow: {error}")) from error
        if selector:
            selector.finished(record.tape)
        record.finished(graded)
        if ranks_met():
            agree_traced(region, record)
        # Of what others have, too, the caller gets a copy.
        shares = record.constants.shares
        return record, [quiet(snapshot, t) if shares(t) else t for t in outs]

    def pull(self, prim: Prim, operands: Tensors) -> tuple[torch.Tensor, ...]:
        """Recompute a region behind a fence, and pull its cotangents back."""
        body = prim.body
        assert prim.source is not None
        record: GraphRecord = prim.source.written
        turn = Turn(operands, *prim.cotangents)
        operands = turn.operands
        plain = isinstance(body, PullBack) and prim.recorded is None and not record.rewritten
        if plain and (late := turn.late_readers(record.results)):
            made = self._early(prim, turn, late)
            turn.done(made, [value.fetched for value in record.sent()])
            return made
        run = functools.partial(self._pull, prim, operands)
        # The pull-back of a pull-back has more operands than the forward.
        if prim.mapped or not isinstance(body, PullBack) or body.count != len(record.operands):
            made = run()
        else:
            made = tuple(self.alike.pull(operands, record, body, self.tags, run))
        turn.done(made, [value.fetched for value in record.sent()])
        return made

    def _early(self, prim: Prim, turn: Turn, late: Late) -> tuple[torch.Tensor, ...]:
        """`_pull` for a region whose results others read in the backward before its cotangents are there."""
        outs: list[torch.Tensor] = []

        def seen(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs[:] = made = body.body(*operands)
            return made

        body: Any = prim.body
        prim = replace(prim, body=replace(body, body=seen))
        made = self._pull(prim, turn.operands, [late.after])
        late.read_again(outs)
        return made

    def _pull(self, prim: Prim, operands: Tensors, after: Tensors | None = None) -> tuple[torch.Tensor, ...]:
        first, last = prim.cotangents
        after = operands[first:last] if after is None else after
        assert prim.source is not None
        record: GraphRecord = prim.source.written
        region, ambient = prim.family.region, prim.family.ambient
        with contextlib.ExitStack() as stack:
            tag = stack.enter_context(contextlib.ExitStack())
            tag.enter_context(tagged(self.tags))
            before = record.before
            fenced = [
                t if first <= i < last or record.origins.bare(i) else fence(before.get(i, t), after)
                for i, t in enumerate(operands)
            ]
            for i, (whole, aliasing) in record.together.items():
                (fenced[i],) = aliasing.rebuilt((), [fenced[whole]])
            for value in record.sent():
                quiet(value.fetch, after)
            replay = GraphReplay(record, after, prim.dual or record.tape.loose, tag.close)
            if ambient.must_be_restored():
                stack.enter_context(ambient.restored())
            stack.enter_context(replaying(replay, region.name))
            return tuple((prim.recorded or prim.body)(*fenced))
