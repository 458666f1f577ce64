"""Distil a domain draft model for speculative decoding, and prove that it pays."""
