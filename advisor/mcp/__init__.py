"""Tools for coding agents (Model Context Protocol): what is slow, what a fix saves."""

from pathlib import Path

SKILL = Path(__file__).with_name("skill") / "SKILL.md"
"""File that tells an agent how to use advisor."""
