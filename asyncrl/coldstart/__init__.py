"""The supervised cold start: demonstrations, their annotation, training rows."""
