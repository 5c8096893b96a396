"""The measured step on another GPU: each piece of device work moved by what bounds it, replayed."""
