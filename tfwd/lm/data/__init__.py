"""Texts as streams of token ids, and the vocabulary."""
