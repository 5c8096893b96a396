"""Formats of files. Each is a module, or a package with the reader in ``reader.py``."""
