"""Generators: vLLM engines in Ray actors, the weights they receive, and a scripted stand-in for tests."""
