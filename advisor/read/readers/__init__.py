"""Readers, one format per file. Every :class:`Reader` in a file here is found and used."""
