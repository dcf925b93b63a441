"""What all benchmarks share: models, peers, steps, measures and records."""
