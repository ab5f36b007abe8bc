"""Read documents from files: local or remote, compressed, JSON or Parquet."""
