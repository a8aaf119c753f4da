"""Credit, losses and staleness arithmetic. Pure."""
