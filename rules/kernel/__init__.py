"""Rules about what kernels do with the device."""
