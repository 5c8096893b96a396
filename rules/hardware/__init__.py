"""Rules about the GPU as a machine: clocks, links, errors, other processes."""
