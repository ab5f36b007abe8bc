"""The models: layers, heads and losses, as pure functions of their parameters."""
