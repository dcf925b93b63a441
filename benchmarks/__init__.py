"""Benchmarks, one file or room a claim: each writes a CSV under `results/` and says if targets are met."""
