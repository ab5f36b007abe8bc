"""Convert models from and to the directories of Hugging Face's transformers."""
