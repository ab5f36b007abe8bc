"""The mesh, and the placement of every array on it."""
