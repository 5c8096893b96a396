"""The dependency graph of the steps, its replay, and the Edits applied to it: what a fix gains."""
