"""The overlap schedule: layers in an order that hides what they send (`schedule.py`)."""
