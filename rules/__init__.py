"""The rules: one or one group a file, in a folder a category. Import them as ``advisor.rules``."""
