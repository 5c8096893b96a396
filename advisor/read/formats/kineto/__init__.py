"""Reader of PyTorch profiler (Kineto) traces, in pieces that are decoded independently."""
