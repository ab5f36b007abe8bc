"""Errors, text for people, and files, which every part uses."""
