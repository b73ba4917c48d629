"""Measurements; nothing imports these. Results lie in benchmarks/results/."""
