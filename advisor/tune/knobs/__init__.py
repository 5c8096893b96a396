"""One file a kind of knob. They run in the trial's process: no more is imported than torch."""
