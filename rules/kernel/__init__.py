"""Rules about how well kernels use the GPU."""
