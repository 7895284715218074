"""Prompts with a known answer."""
