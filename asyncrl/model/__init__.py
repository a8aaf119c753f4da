"""Making and loading models and tokenizers."""
