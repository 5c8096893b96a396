"""Formats of files: a file each, or a folder each, with the reader in ``reader.py``."""
