"""The demo: what hf_cb does for 32 threads that share one model, with a small model that a package ships."""
