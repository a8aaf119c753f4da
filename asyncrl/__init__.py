"""asyncrl: asynchronous reinforcement learning for language-model agents, on Ray."""

__version__ = "0.1.0"
