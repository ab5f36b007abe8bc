"""Start the processes of a run, and let them meet, agree and end together."""
