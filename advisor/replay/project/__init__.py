"""Projection of the measured step to another GPU: device work scaled by its limit, and replayed."""
