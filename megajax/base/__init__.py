"""Errors, text for people, and files, which all packages use."""
