"""transformers' and PEFT's own generation tests, plain and with every model installed: `make hf-tests`."""
