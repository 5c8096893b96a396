"""Documents, one file a subject: the only place that writes a subject's text for every format."""
