"""Reader of XPlane files, and of what TensorFlow, JAX and PyTorch/XLA write in them."""
