"""Trials of the advice: a knob for each finding, measured in fresh processes, side by side."""
