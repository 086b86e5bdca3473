"""`transformers.pipeline` on an installed model."""
