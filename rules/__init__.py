"""The rules: one a file, in a folder a category. Import them as ``advisor.rules``."""
