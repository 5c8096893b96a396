"""Reader of XPlane files, and of the events of TensorFlow, JAX and PyTorch/XLA in them."""
