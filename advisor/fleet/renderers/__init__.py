"""The report of a job in words: one file a format."""
