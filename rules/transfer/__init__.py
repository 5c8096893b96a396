"""Rules about copies between host and GPU."""
