"""Formats of a report, one a file: the file's name is the format's."""
