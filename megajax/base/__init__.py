"""Errors, messages, and files, which all packages use."""
