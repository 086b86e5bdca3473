"""Programs that use hf_cb where people generate: through its public API only, with the packaged model by default."""
