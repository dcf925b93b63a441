"""One process of test_layouts: rows of `benchmarks.many_devices`."""

from benchmarks.many_devices.layouts import rows
from tests.interop.ranks import group_of

OURS = "save_matmuls \\| save_collectives"
# Ours, and torch's with the same verdicts.
PAIRS = {OURS: "torch SAC (matmuls and collectives)", "save_nothing": "torch checkpoint"}


def quick(rank: int, path: str) -> None:
    """One step without remat, and with."""
    with group_of(rank, path, 4, seconds=300):
        plain, ours = rows("FSDP2 x TP", [OURS], steps=1)
        assert ours["difference"] == 0 and ours["kept"] < plain["kept"], ours
        assert ours["sent"]["reduce-scatter"] == plain["sent"]["reduce-scatter"], (ours, plain)


def beside_torch(rank: int, path: str, size: int, layouts: list[str]) -> None:
    with group_of(rank, path, size, seconds=300):
        for layout in layouts:
            found = {
                row["policy"]: row for row in rows(layout, [name for pair in PAIRS.items() for name in pair])
            }
            for ours, theirs in PAIRS.items():
                row, torchs = found[ours], found[theirs]
                assert row["difference"] == 0, (layout, ours, row)
                assert row["kept"] < found["none"]["kept"], (layout, ours, row["kept"])
                if "error" in torchs:
                    # Torch's selective checkpoint takes no backward in parts.
                    assert "extra time" in torchs["error"], (layout, torchs["error"])
                else:
                    assert row["kept"] <= torchs["kept"], (layout, ours, row["kept"], torchs["kept"])
                    assert row["sent"] == torchs["sent"], (layout, ours, row["sent"], torchs["sent"])
