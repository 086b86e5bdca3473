"""From a scheduled step to sampled tokens: the only package that calls the model."""
