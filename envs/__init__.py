"""Environments: one file or folder each; none knows of Ray, vLLM or training."""
