"""Published measurements, and the planner's predictions of them."""
