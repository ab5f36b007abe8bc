"""Make batches of documents with images from JSON lines."""
