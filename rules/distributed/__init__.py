"""Rules about several GPUs."""
