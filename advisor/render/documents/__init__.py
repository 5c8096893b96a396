"""Documents, one file a subject: the only place that words a subject for every format."""
