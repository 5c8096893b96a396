"""Jobs of many ranks that never ran: simulated event by event, with faults whose truth is known.

``draw`` chooses a job by a seed, ``simulate`` runs it, ``kineto.write`` writes the files that
PyTorch's profiler would have written, ``summaries.summarize_all`` what workers would say of them.
"""
