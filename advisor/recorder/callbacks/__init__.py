"""Callbacks that record from a trainer's own list: Lightning and Hugging Face Transformers.

Steps and phases are found by the same hooks as everywhere; a callback only says when training
begins and ends. Accelerate and DDP need none."""
