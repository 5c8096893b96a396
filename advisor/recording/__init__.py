"""Inside the training process: hooks, windows and telemetry that write a run directory."""
