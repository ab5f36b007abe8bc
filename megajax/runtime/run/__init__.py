"""A run on a machine: the training loop, its watchdog, stopping and resuming."""
