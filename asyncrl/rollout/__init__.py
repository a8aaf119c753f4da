"""Forest expansion over generators and environment workers."""
