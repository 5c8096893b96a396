"""Functions that several rules share, and the sources of numbers. No rule is defined here."""
