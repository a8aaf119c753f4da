"""The measurements behind the numbers in the docs."""
