"""The training step: its config, mesh, parameters, model, gradients and update."""
