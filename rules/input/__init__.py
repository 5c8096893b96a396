"""Rules about the input pipeline."""
