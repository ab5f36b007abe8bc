"""Random training steps, compiled for a GPU, executed on a CPU and compared with one device."""
