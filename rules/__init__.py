"""The rules: one rule or family a file, in a folder a category. Import them as ``advisor.rules``."""
