"""Tries what was advised: a knob for each finding, measured in fresh processes, side by side."""
