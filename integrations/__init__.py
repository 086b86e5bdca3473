"""Programs that use hf_cb where people use Hugging Face models: training loops, evaluation and the like."""
