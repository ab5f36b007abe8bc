"""The processes of a run: how they start, meet, agree and end together."""
