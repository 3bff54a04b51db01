"""Studies: a question, small changes to a run, a rule fixed before the runs, and an answer with its uncertainty."""
