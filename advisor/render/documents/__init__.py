"""Documents, one file per subject: the only place that writes a subject's text for all formats."""
