"""Readers of ROCm's profilers."""
