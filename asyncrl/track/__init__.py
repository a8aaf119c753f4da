"""Where measurements go: one sink protocol, one writer, one run folder."""
