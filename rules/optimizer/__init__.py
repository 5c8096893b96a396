"""Rules about the optimizer step."""
