"""Decoding, distillation, metrics and gates on torch, transformers and numpy alone."""
