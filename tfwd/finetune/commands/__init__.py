"""The programs for fine-tuning."""
