"""Knobs, a file for each kind. They run in the trial's process and import nothing but torch."""
