"""Attention rows of real models: exact queries, keys and values as the model used them (torch, transformers)."""
