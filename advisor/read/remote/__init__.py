"""Remote files: object storage, web servers and archives, by any URL that fsspec knows."""
