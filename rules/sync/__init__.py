"""Rules about host waits for the GPU."""
