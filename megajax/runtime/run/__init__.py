"""A run on a machine: the loop, and what watches, stops and resumes it."""
