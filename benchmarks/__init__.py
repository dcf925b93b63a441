"""Benchmarks, one file a claim; each writes a long CSV under `results/` and says whether targets are met."""
