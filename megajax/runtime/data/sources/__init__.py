"""The files that documents are read from: local or remote, compressed, JSON or Parquet."""
