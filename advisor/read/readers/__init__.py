"""Readers, one format a file. Whatever :class:`Reader` stands in a file here is found and used."""
