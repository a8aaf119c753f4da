"""The asynchronous loop and what it runs on."""
