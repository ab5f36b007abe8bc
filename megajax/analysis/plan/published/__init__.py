"""Published measurements, and what the planner says of them."""
