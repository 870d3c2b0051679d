"""Networks as Hugging Face folders."""
