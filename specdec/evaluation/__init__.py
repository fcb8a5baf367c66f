"""Evaluates drafters: runs prompts, compares texts, computes statistics, tables and plots."""
