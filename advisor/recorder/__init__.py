"""Recorder inside the training process: hooks, windows, telemetry that write a run directory.

What happens to one step, in order: ``hooks`` see torch's calls, ``clock`` times them, ``steps``
finds where a step ends, ``session`` hands it to ``writer``, which is the only one that writes.
``windows`` records a few steps with torch's profiler. ``api`` is what users call."""
