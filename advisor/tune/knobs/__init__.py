"""One file a lever. They run in the trial's process: no more is imported than torch."""
