"""One process of test_layouts: rows of `benchmarks.many_devices`, of one step each."""

from benchmarks.many_devices.layouts import rows
from tests.interop.ranks import group_of

# Ours, and torch's with the same verdicts.
OURS, TORCHS = "save_matmuls \\| save_collectives", "torch SAC (matmuls and collectives)"


def beside_torch(rank: int, path: str, size: int, layouts: list[str]) -> None:
    """Without remat, with, and torch's own."""
    with group_of(rank, path, size, seconds=300):
        for layout in layouts:
            plain, ours, torchs = rows(layout, [OURS, TORCHS], steps=1)
            assert ours["difference"] == 0 and ours["kept"] < plain["kept"], (layout, ours)
            scattered = [row["sent"].get("reduce-scatter") for row in (ours, plain)]
            assert scattered[0] == scattered[1], (layout, ours, plain)
            if "error" in torchs:
                # Torch's selective checkpoint takes no backward in parts.
                assert "extra time" in torchs["error"], (layout, torchs)
            else:
                assert ours["kept"] <= torchs["kept"], (layout, ours["kept"], torchs["kept"])
                assert ours["sent"] == torchs["sent"], (layout, ours["sent"], torchs["sent"])
