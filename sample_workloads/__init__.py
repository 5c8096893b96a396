"""Small training programs, each slow on purpose, with its cure and the findings it must produce.

Each file has the same functions: ``train`` runs a variant (``slow`` or ``cured``) and returns its
losses; ``record`` does so under ``torch.profiler`` and writes a trace. torch is imported when they
are called, never on import.
"""
