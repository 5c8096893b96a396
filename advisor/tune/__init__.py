"""Tries what was advised: a lever for each finding, measured in fresh processes, side by side."""
