"""Typed configuration: YAML in, one frozen pydantic model out."""
