"""Rules about torch.compile and CUDA graphs."""
