"""Readers of single kernels: hardware counters, sampled lines, and what Triton compiled."""
