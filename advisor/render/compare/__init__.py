"""Formats of a comparison, one a file: the file's name is the format's."""
