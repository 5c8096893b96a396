"""Rules about the host and kernel launches."""
