"""What a person starts: whole runs, checks, the quickstart."""
