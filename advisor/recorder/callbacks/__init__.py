"""Callbacks that record from a trainer's own list: Lightning and Hugging Face Transformers.

The usual hooks find steps and phases. A callback only marks when training begins and ends.
Accelerate and DDP do not need one."""
