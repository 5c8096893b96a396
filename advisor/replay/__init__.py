"""What a fix gains: the dependency graph of the steps, its replay, and Edits applied to it."""
