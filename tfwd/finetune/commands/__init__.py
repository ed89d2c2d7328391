"""Console scripts for fine-tuning."""
