"""Prompts, memory window and output formats. Pure: no tokenizer, no Ray, no engine."""
