"""Kinds of host events and of device work, in the order of their codes.

Imports nothing from the project, because decoding processes load it and do without polars."""

CPU_KINDS = ("op", "annotation", "python", "runtime", "overhead")
GPU_KINDS = ("kernel", "memcpy", "memset")
