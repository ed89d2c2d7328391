"""Labelled texts, their batches, and the vocabulary of the pretrained encoder."""
