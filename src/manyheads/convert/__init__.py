"""Pretrained models: adopt, convert, heal, verify, export."""
