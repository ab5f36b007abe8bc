"""The overlap schedule: an order of the layers' steps that hides communication (`schedule.py`)."""
