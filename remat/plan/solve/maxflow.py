"""Minimum cuts by Dinic's algorithm, on integer capacities (exact, and it terminates)."""

from __future__ import annotations


class Network:
    """A flow network on nodes `0 .. n-1`; capacities are Python ints of any size.

    Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
    estimation", 1970.
    """

    def __init__(self, nodes: int):
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]
        self.head: list[int] = []
        self.room: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """One arc and its reverse, at positions 2k and 2k + 1 so that `arc ^ 1` is the partner."""
        self.arcs[tail].append(len(self.head))
        self.arcs[head].append(len(self.head) + 1)
        self.head += [head, tail]
        self.room += [capacity, 0]

    def source_side(self, source: int, sink: int) -> list[bool]:
        """The largest source side among all minimum cuts: nodes that cannot reach the sink any more."""
        while (level := self._levels(source, sink)) is not None:
            self._block(source, sink, level)
        reaches = [False] * len(self.arcs)
        reaches[sink] = True
        todo = [sink]
        while todo:
            for arc in self.arcs[todo.pop()]:
                tail = self.head[arc]
                if not reaches[tail] and self.room[arc ^ 1]:
                    reaches[tail] = True
                    todo.append(tail)
        return [not r for r in reaches]

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Distance to the sink along arcs with room, or None where the source is cut off."""
        level = [-1] * len(self.arcs)
        level[sink] = 0
        layer = [sink]
        head, room, arcs = self.head, self.room, self.arcs
        while layer and level[source] < 0:
            following = []
            for node in layer:
                for arc in arcs[node]:
                    tail = head[arc]
                    if level[tail] < 0 and room[arc ^ 1]:
                        level[tail] = level[node] + 1
                        following.append(tail)
            layer = following
        return level if level[source] >= 0 else None

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """A blocking flow along arcs that come one level closer to the sink."""
        head, room, arcs = self.head, self.room, self.arcs
        following = [0] * len(arcs)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                flow = min(room[arc] for arc in path)
                for arc in path:
                    room[arc] -= flow
                    room[arc ^ 1] += flow
                cut = next(k for k, arc in enumerate(path) if not room[arc])
                node = head[path[cut] ^ 1]
                del path[cut:]
                continue
            while following[node] < len(arcs[node]):
                arc = arcs[node][following[node]]
                if room[arc] and level[head[arc]] == level[node] - 1:
                    break
                following[node] += 1
            else:
                if not path:
                    return
                arc = path.pop()
                node = head[arc ^ 1]
                following[node] += 1
                continue
            path.append(arc)
            node = head[arc]
