"""Write, verify, compare, retain and open the checkpoints of a run."""
