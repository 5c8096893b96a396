"""The rules: one or one family a file, in a folder a category. Import them as ``advisor.rules``."""
