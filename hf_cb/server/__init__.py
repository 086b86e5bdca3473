"""An HTTP server that speaks OpenAI's API, for models that hf_cb is installed on."""
