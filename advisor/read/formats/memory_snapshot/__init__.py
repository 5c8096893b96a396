"""Readers of the allocator's snapshot and of the profiler's memory timeline."""
