"""The dashboard: a Dash application over a run. Import it as ``advisor.dashboard``."""
