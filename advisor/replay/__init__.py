"""Dependency graph of the steps, its replay, and the Edits applied to it, to estimate gains of
fixes."""
