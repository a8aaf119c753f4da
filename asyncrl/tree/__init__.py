"""The forest of one task: its leaf budget, where it branches, and its record on disk. Pure."""
