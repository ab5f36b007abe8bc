"""What the compiler is told of a GPU that need not be there."""
