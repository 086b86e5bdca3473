"""The seam to transformers: the only package that imports it."""
