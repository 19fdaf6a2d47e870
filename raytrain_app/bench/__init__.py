"""Measurements of the product against what is there without it; each prints its numbers and asserts none."""
