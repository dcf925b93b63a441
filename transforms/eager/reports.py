"""What a frame tells those who listen to what regions keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.transforms.tape import Kept, held_tensors, report

if TYPE_CHECKING:
    from remat.transforms.eager.frame import Frame
    from remat.transforms.tape import Recorder


def report_frame(frame: Frame, recorder: Recorder) -> None:
    """Report every tensor that a frame holds until its backward, and why."""
    name, tape, nodes = frame.region.name, frame.tape, frame.tape.nodes
    for at, held in frame.held.items():
        # What an enclosing region is to recompute stays alive no longer than that takes.
        if not held.enclosed:
            why = "argument" if at < tape.arguments else "captured"
            report(Kept(why, recorder.outside[at], name, at))
    for at, value in frame.kept.items():
        # A view is the memory of the op that made it.
        node, root = nodes[at], nodes[at].root
        maker = nodes[root] if root >= 0 else node
        for tensor, away in held_tensors(value):
            why = "decision" if at in tape.decided else "policy"
            report(Kept(why, tensor, name, at, maker.op, node.name or maker.name, away))
    for i, ref in enumerate(frame.handles):
        handle = None if ref is None else ref()
        if handle is None or handle.value is None:
            continue
        number, _ = tape.packed[i]
        root = tape.root_of(number)
        node = nodes[root] if root >= 0 else None
        made = nodes[tape.makers[number]] if number >= 0 else None
        saved = made is not None and node is not None and (made.verdict or node.verdict)
        why = "captured" if node is None else "policy" if saved else "residual"
        place = tape.makers[number] if number >= 0 else i
        report(Kept(why, handle.value.get(), name, place, node and node.op, node and node.name))
    for snapshot in frame.snapshots.values():
        for tensor in snapshot.tensors():
            report(Kept("captured", tensor, name, -1))
