"""Documents with pictures, from JSON lines to batches."""
