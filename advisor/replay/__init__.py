"""What a fix is worth: the dependency graph of the steps, its replay, and Edits applied to it."""
