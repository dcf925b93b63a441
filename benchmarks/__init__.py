"""Benchmarks, one file or room a claim. Each writes a CSV under `results/` and says whether targets are met."""
