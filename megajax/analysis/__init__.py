"""Studies of a step or a run: inspect, plan, compare, profile and report."""
