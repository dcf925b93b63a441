"""Benchmarks, one file or room a claim; each writes a long CSV under `results/` and says whether targets are met."""
