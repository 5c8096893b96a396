"""A Report and its renderers: plain data first, then one small file a format."""

from __future__ import annotations

from advisor.report.data import Report

__all__ = ["Report"]
